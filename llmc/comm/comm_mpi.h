/*
comm_mpi.h -- comm.h over MPI.

MPI is used if the program was built with it (HAVE_MPI).

needs:   MPI, for more than one rank; only this file includes it, for itself and group.h
*/
#ifndef LLMC_COMM_MPI_H
#define LLMC_COMM_MPI_H

#include "llmc/base/check.h"
#include "llmc/comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

// Joins the ranks, which the launcher must have started. Sets engine, library and communicator.
void comm_mpi_open(Comm* c);

#ifdef __cplusplus
}
#endif

// ---- for group.h ----

#ifdef HAVE_MPI

#include <mpi.h>

#define MPI_CHECK(call)                                                                                      \
    do {                                                                                                     \
        const int error_ = (call);                                                                           \
        char words_[MPI_MAX_ERROR_STRING] = "";                                                              \
        int length_;                                                                                         \
        if (error_ != MPI_SUCCESS) {                                                                         \
            MPI_Error_string(error_, words_, &length_);                                                      \
        }                                                                                                    \
        CHECK_CALL(error_ == MPI_SUCCESS, "%s: %s", #call, words_);                                          \
    } while (0)

// State behind c->communicator.
typedef struct {
    MPI_Comm all;        // our own, separate from other users' messages
    int was_initialized; // someone else has initialized MPI, and finalizes it
} CommMpi;

// Returns the communicator of all ranks.
static inline MPI_Comm comm_mpi_all(const Comm* c) { return ((const CommMpi*)c->communicator)->all; }

#endif

#ifdef COMM_MPI_IMPLEMENTATION

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef HAVE_MPI

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
        MPI_Abort(comm_mpi_all(c), status);
    }
}

static void comm_mpi_broadcast_(Comm* c, void* data, size_t bytes) {
    const size_t most = 1 << 30; // MPI counts in int
    for (size_t done = 0; done < bytes; done += most) {
        const size_t part = bytes - done < most ? bytes - done : most;
        MPI_CHECK(MPI_Bcast((char*)data + done, (int)part, MPI_BYTE, 0, comm_mpi_all(c)));
    }
}

static void comm_mpi_all_gather_(Comm* c, void* all, const void* mine, size_t bytes) {
    CHECK(bytes <= INT_MAX, "comm_all_gather: %zu bytes; wanted at most %d", bytes, INT_MAX);
    MPI_CHECK(MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, comm_mpi_all(c)));
}

static int comm_mpi_any_(Comm* c, int mine) {
    int any;
    MPI_CHECK(MPI_Allreduce(&mine, &any, 1, MPI_INT, MPI_BOR, comm_mpi_all(c)));
    return any;
}

static void comm_mpi_close_(Comm* c) {
    CommMpi* mpi = (CommMpi*)c->communicator;
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
        MPI_CHECK(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided));
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
    CommMpi* mpi = (CommMpi*)check_alloc(1, sizeof(CommMpi), "communicator");
    mpi->was_initialized = was_initialized;
    MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &mpi->all));
    MPI_Comm_set_errhandler(mpi->all, MPI_ERRORS_RETURN);
    c->communicator = mpi;
    comm_set_engine(c, &engine);
}

#else

void comm_mpi_open(Comm* c) {
    die_usage(
        "%d processes, but this program was built without MPI: scripts/install_deps.sh --mpi, and make again",
        c->size);
}

#endif

#endif // COMM_MPI_IMPLEMENTATION

#endif
