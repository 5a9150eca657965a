/*
launch.h -- which of how many processes this is: what the command line or the launcher says.

The first of these that is there:

    source       rank, size, local rank, local size
    options      --rank, --num-processes; local: --rank mod --gpus-per-node
    mpirun       OMPI_COMM_WORLD_RANK _SIZE _LOCAL_RANK _LOCAL_SIZE              Open MPI, Kubernetes' MPIJob
    mpiexec      PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS               MPICH, Intel MPI
    srun         SLURM_PROCID SLURM_NTASKS SLURM_LOCALID                         in a step of more than one task
    torchrun     RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
    none         0 of 1

A source that is incomplete, or whose numbers make no sense, is refused with its names and values.

defines: LAUNCH_INIT_WORDS, LaunchInit, Launch, launch_find, launch_find_in, launch_expect, launch_zero
*/
#ifndef LLMC_LAUNCH_H
#define LLMC_LAUNCH_H

#include "llmc/base/words.h"
#include "llmc/comm.h"
#include "llmc/run/options.h"

#ifdef __cplusplus
extern "C" {
#endif

// --init: how the processes meet.
// clang-format off
#define LAUNCH_INIT_WORDS(X) \
    X(LAUNCH_AUTO, "auto") \
    X(LAUNCH_MPI, "mpi") \
    X(LAUNCH_TCP, "tcp") \
    X(LAUNCH_FS, "fs")
// clang-format on
typedef enum { LAUNCH_INIT_WORDS(WORDS_VALUE) } LaunchInit;

typedef struct {
    CommPlace place;
    LaunchInit init;      // never LAUNCH_AUTO where there is more than one process
    const char* launcher; // "mpirun"; "" for one process
} Launch;

// From the options and the environment. Ends the program where they make no sense.
Launch launch_find(const Options* options);

// The same in an environment of "NAME=value", ended by NULL.
Launch launch_find_in(const Options* options, const char* const* environment);

// The place that the environment alone tells, for comm_expect; 0 of 1 where it makes no sense, which launch_find
// says later.
CommPlace launch_expect(void);

// --zero, or what auto means: 2 for more than one process.
int launch_zero(const Options* options, int size);

#ifdef __cplusplus
}
#endif

#endif
