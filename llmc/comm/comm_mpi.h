/*
comm_mpi.h -- comm.h over MPI: its messages, and bulk data on the CPU.

Everything is collective: all ranks, of the Comm or of the Group, call it in the same order. With
one rank it returns at once. MPI is used if the program was built with it (HAVE_MPI).

Elements are fp32; their number may exceed an int.

needs:   MPI, for more than one rank; only this file includes it
*/
#ifndef LLMC_COMM_MPI_H
#define LLMC_COMM_MPI_H

#include <stddef.h>

#include "llmc/comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

// Joins the ranks; they must be those of the launcher. Sets engine, library and communicator.
void comm_mpi_open(Comm* c);

// ---- bulk data on the CPU ----

// Ordered set of ranks.
typedef struct {
    int rank, size;
    void* communicator; // private
    Comm* comm;
} Group;

// Opens the group of ranks with the same color, in the order of their keys; color < 0: this rank is
// in no group, and its size is 0.
void group_open(Group* g, Comm* c, int color, int key);

void group_close(Group* g);

// Sends chunk j of send to rank j; chunk i of recv is from rank i. Both (size, count); they must
// not overlap.
void group_all_to_all_cpu(float* recv, const float* send, size_t count, Group* g);

// Gathers recv (size, count) from each rank's send (count). In place: send = recv + rank * count.
void group_all_gather_cpu(float* recv, const float* send, size_t count, Group* g);

#ifdef __cplusplus
}
#endif

#ifdef COMM_MPI_IMPLEMENTATION

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

#ifdef HAVE_MPI

#include <mpi.h>

// State behind c->communicator.
typedef struct {
    MPI_Comm all;        // our own, separate from other users' messages
    int was_initialized; // someone else has initialized MPI, and finalizes it
} CommMpi_;

static inline MPI_Comm comm_mpi_all_(const Comm* c) { return ((const CommMpi_*)c->communicator)->all; }

#define COMM_MPI_(call)                                                                                      \
    do {                                                                                                     \
        const int error_ = (call);                                                                           \
        char words_[MPI_MAX_ERROR_STRING] = "";                                                              \
        int length_;                                                                                         \
        if (error_ != MPI_SUCCESS) {                                                                         \
            MPI_Error_string(error_, words_, &length_);                                                      \
        }                                                                                                    \
        CHECK_CALL(error_ == MPI_SUCCESS, "%s: %s", #call, words_);                                          \
    } while (0)

// Sets library to "Open MPI 4.1.4", from "Open MPI v4.1.4, package: ..." or "MPICH
// Version:\t4.0.2\n...".
static void comm_mpi_library_(char* library, size_t room) {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "", name[32] = "", version[32] = "";
    int length;
    MPI_Get_library_version(text, &length);
    if (sscanf(text, "Open MPI v%31[0-9.]", version) == 1) {
        snprintf(library, room, "Open MPI %s", version);
    } else if (sscanf(text, "%31s Version: %31s", name, version) == 2) {
        snprintf(library, room, "%s %s", name, version);
    } else {
        snprintf(library, room, "%.*s", (int)strcspn(text, ",\n"), text);
    }
}

// Calls MPI_Abort in the main thread only, as MPI demands; in others, the launcher notices the end
// of the process.
static void comm_mpi_abort_(const Comm* c, int status) {
    if (check_is_main_thread()) {
        MPI_Abort(comm_mpi_all_(c), status);
    }
}

static void comm_mpi_broadcast_(Comm* c, void* data, size_t bytes) {
    const size_t most = 1 << 30; // MPI counts in int
    for (size_t done = 0; done < bytes; done += most) {
        const size_t part = bytes - done < most ? bytes - done : most;
        COMM_MPI_(MPI_Bcast((char*)data + done, (int)part, MPI_BYTE, 0, comm_mpi_all_(c)));
    }
}

static void comm_mpi_all_gather_(Comm* c, void* all, const void* mine, size_t bytes) {
    CHECK(bytes <= INT_MAX, "comm_all_gather: %zu bytes; wanted at most %d", bytes, INT_MAX);
    COMM_MPI_(MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, comm_mpi_all_(c)));
}

static int comm_mpi_any_(Comm* c, int mine) {
    int any;
    COMM_MPI_(MPI_Allreduce(&mine, &any, 1, MPI_INT, MPI_BOR, comm_mpi_all_(c)));
    return any;
}

static void comm_mpi_close_(Comm* c) {
    CommMpi_* mpi = (CommMpi_*)c->communicator;
    MPI_Comm_free(&mpi->all);
    if (!mpi->was_initialized) {
        MPI_Finalize();
    }
    free(mpi);
}

void comm_mpi_open(Comm* c) {
    static const CommEngine engine = {comm_mpi_broadcast_, comm_mpi_all_gather_, comm_mpi_any_, NULL,
                                      comm_mpi_abort_,     comm_mpi_close_};
    int rank, size, provided, was_initialized;
    MPI_Initialized(&was_initialized);
    if (!was_initialized) {
        COMM_MPI_(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided));
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    comm_mpi_library_(c->library, sizeof(c->library));
    if (rank != c->rank || size != c->size) {
        die_usage(
            "rank %d of %d by the command line or the launcher, rank %d of %d by MPI; wanted the mpirun of "
            "%s, which this program was built with",
            c->rank, c->size, rank, size, c->library);
    }
    CommMpi_* mpi = (CommMpi_*)check_alloc(1, sizeof(CommMpi_), "communicator");
    mpi->was_initialized = was_initialized;
    COMM_MPI_(MPI_Comm_dup(MPI_COMM_WORLD, &mpi->all));
    MPI_Comm_set_errhandler(mpi->all, MPI_ERRORS_RETURN);
    c->communicator = mpi;
    comm_set_engine(c, &engine);
}

void group_open(Group* g, Comm* c, int color, int key) {
    const Group one = {0, color < 0 ? 0 : 1, NULL, c};
    *g = one;
    if (c->size > 1) {
        MPI_Comm split;
        COMM_MPI_(MPI_Comm_split(comm_mpi_all_(c), color < 0 ? MPI_UNDEFINED : color, key, &split));
        if (color >= 0) {
            MPI_Comm_rank(split, &g->rank);
            MPI_Comm_size(split, &g->size);
            g->communicator = check_alloc(1, sizeof(split), "communicator");
            memcpy(g->communicator, &split, sizeof(split));
        }
    }
}

void group_close(Group* g) {
    if (g->communicator) {
        MPI_Comm_free((MPI_Comm*)g->communicator);
        free(g->communicator);
        g->communicator = NULL;
    }
}

enum { GROUP_CHUNK_ = 4 << 20 }; // elements of one message

// Sends and receives one part of each chunk, from element `begin` on: MPI counts in int. Each rank
// starts with a different peer, so that no rank gets all messages at once.
static void group_exchange_chunk_(float* recv, const float* send, size_t send_stride, size_t begin,
                                  size_t count, Group* g, MPI_Request* requests) {
    const int part = (int)(count - begin < GROUP_CHUNK_ ? count - begin : GROUP_CHUNK_);
    MPI_Comm all = *(MPI_Comm*)g->communicator;
    int started = 0;
    for (int k = 1; k < g->size; k++) {
        const int from = (g->rank + g->size - k) % g->size;
        COMM_MPI_(
            MPI_Irecv(recv + from * count + begin, part, MPI_FLOAT, from, 0, all, &requests[started++]));
    }
    for (int k = 1; k < g->size; k++) {
        const int to = (g->rank + k) % g->size;
        COMM_MPI_(
            MPI_Isend(send + to * send_stride + begin, part, MPI_FLOAT, to, 0, all, &requests[started++]));
    }
    for (int i = 0; i < started; i++) {
        COMM_MPI_(MPI_Wait(&requests[i], MPI_STATUS_IGNORE));
    }
}

// Exchanges chunks: rank j gets (count) from send + j * send_stride.
static void group_exchange_(float* recv, const float* send, size_t send_stride, size_t count, Group* g) {
    if (g->size > 1) {
        MPI_Request* requests =
            (MPI_Request*)check_alloc(2 * (size_t)g->size, sizeof(MPI_Request), "requests of MPI");
        for (size_t begin = 0; begin < count; begin += GROUP_CHUNK_) {
            group_exchange_chunk_(recv, send, send_stride, begin, count, g, requests);
        }
        free(requests);
    }
    if (recv + g->rank * count != send + g->rank * send_stride) {
        memcpy(recv + g->rank * count, send + g->rank * send_stride, count * sizeof(float));
    }
}

#else

void comm_mpi_open(Comm* c) {
    die_usage(
        "%d processes, but this program was built without MPI: scripts/install_deps.sh --mpi, and make again",
        c->size);
}

void group_open(Group* g, Comm* c, int color, int key) {
    const Group one = {0, color < 0 ? 0 : 1, NULL, c};
    (void)key;
    *g = one;
}

void group_close(Group* g) { (void)g; }

static void group_exchange_(float* recv, const float* send, size_t send_stride, size_t count, Group* g) {
    (void)send_stride, (void)g;
    if (recv != send) {
        memcpy(recv, send, count * sizeof(float));
    }
}

#endif

void group_all_to_all_cpu(float* recv, const float* send, size_t count, Group* g) {
    group_exchange_(recv, send, count, count, g);
}

void group_all_gather_cpu(float* recv, const float* send, size_t count, Group* g) {
    group_exchange_(recv, send, 0, count, g);
}

#endif // COMM_MPI_IMPLEMENTATION

#endif
