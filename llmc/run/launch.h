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

defines: LAUNCH_INIT_WORDS, LaunchInit, Launch, launch_find, launch_find_in, launch_expect, launch_zero, launch_shards
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

// --shard-ranks, or what auto means: the processes of a machine, if all machines have equally many, rank after rank;
// else all. Collective, with options->processes set; a mere plan (comm->size 1) goes by --gpus-per-node.
int launch_shards(const Options* options, Comm* comm);

#ifdef __cplusplus
}
#endif

#ifdef LAUNCH_IMPLEMENTATION

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/comm_mpi.h"

extern char** environ;

typedef struct {
    const char *launcher, *names[4]; // of rank, size, local rank, local size
    LaunchInit init;
} LaunchSource_;

// clang-format off
static const LaunchSource_ LAUNCH_SOURCES_[] = {
    {"mpirun",   {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                  "OMPI_COMM_WORLD_LOCAL_SIZE"},                              LAUNCH_MPI},
    {"mpiexec",  {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}, LAUNCH_MPI},
    {"srun",     {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""},       LAUNCH_MPI},
    {"torchrun", {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},    LAUNCH_TCP},
};
// clang-format on
enum { LAUNCH_SOURCES_COUNT_ = sizeof(LAUNCH_SOURCES_) / sizeof(LAUNCH_SOURCES_[0]) };

// The value of a variable; NULL if it is not there.
static const char* launch_variable_(const char* const* environment, const char* name) {
    const size_t length = strlen(name);
    for (; length && *environment; environment++) {
        if (strncmp(*environment, name, length) == 0 && (*environment)[length] == '=') {
            return *environment + length + 1;
        }
    }
    return NULL;
}

// Does the source count? Under Slurm a script has its variables, too, outside of any step of several tasks.
static int launch_is_there_(const LaunchSource_* source, const char* const* environment) {
    const char* size = launch_variable_(environment, source->names[1]);
    if (strcmp(source->launcher, "srun") == 0) {
        return launch_variable_(environment, "SLURM_STEP_ID") && size && strcmp(size, "1") != 0;
    }
    return size || launch_variable_(environment, source->names[0]);
}

// A number from 0 on; -1 for what is none.
static int launch_number_(const char* text) {
    errno = 0;
    const long number =
        text && *text && strspn(text, "0123456789") == strlen(text) ? strtol(text, NULL, 10) : -1;
    return errno == 0 && number <= INT_MAX ? (int)number : -1;
}

static int launch_makes_sense_(CommPlace place) {
    return place.rank >= 0 && place.rank < place.size && place.local_rank < place.size &&
           (place.local_size < 0 || (place.local_size > place.local_rank && place.local_size <= place.size));
}

// Ends the program: "wanted ...: OMPI_COMM_WORLD_RANK=4 OMPI_COMM_WORLD_SIZE=4 ...".
__attribute__((noreturn)) static void launch_refuse_(const LaunchSource_* source,
                                                     const char* const* environment) {
    char found[512] = "";
    size_t used = 0;
    for (int i = 0; i < 4 && used < sizeof(found); i++) {
        const char* value = launch_variable_(environment, source->names[i]);
        if (*source->names[i]) {
            used += (size_t)snprintf(found + used, sizeof(found) - used, " %s%s%s", source->names[i],
                                     value ? "=" : "", value ? value : " is not set,");
        }
    }
    die_usage("%s says which process this is:%s; wanted a rank below the size, and a local rank below the "
              "local size",
              source->launcher, found);
}

// What the first source that is there says. Returns it; NULL if there is none. The place may make no sense.
static const LaunchSource_* launch_read_(const char* const* environment, CommPlace* place) {
    for (int i = 0; i < LAUNCH_SOURCES_COUNT_; i++) {
        const LaunchSource_* source = &LAUNCH_SOURCES_[i];
        int values[4], is_legal = 1;
        if (!launch_is_there_(source, environment)) {
            continue;
        }
        for (int k = 0; k < 4; k++) {
            const char* text = launch_variable_(environment, source->names[k]);
            values[k] = launch_number_(text);
            is_legal = is_legal && (!text || values[k] >= 0);
        }
        const CommPlace read = {is_legal ? values[0] : -1, values[1], values[2], values[3]};
        *place = read;
        return source;
    }
    return NULL;
}

// --rank and --num-processes. Returns whether they are given.
static int launch_read_options_(const Options* options, CommPlace* place) {
    const int rank = options->rank, size = options->num_processes;
    if (rank == OPTION_AUTO && size == OPTION_AUTO) {
        return 0;
    }
    if (size == OPTION_AUTO || (rank == OPTION_AUTO && size > 1)) {
        die_usage("--%s %d without --%s; wanted both, or a launcher that tells: mpirun -n 4 ...",
                  size == OPTION_AUTO ? "rank" : "num-processes", size == OPTION_AUTO ? rank : size,
                  size == OPTION_AUTO ? "num-processes" : "rank");
    }
    if (rank >= size) {
        die_usage("--rank %d, --num-processes %d; wanted a rank from 0 to %d", rank, size, size - 1);
    }
    const CommPlace read = {rank == OPTION_AUTO ? 0 : rank, size, -1, -1};
    *place = read;
    return 1;
}

// --gpus-per-node, where the launcher does not say what is local. The last machine may have fewer.
static void launch_set_local_(const Options* options, CommPlace* place) {
    const int each = options->gpus_per_node;
    if (each != OPTION_AUTO && place->local_rank < 0) {
        const int first = place->rank / each * each;
        place->local_rank = place->rank - first;
        place->local_size = place->size - first < each ? place->size - first : each;
    }
}

// Ends the program if the processes have no way to connect. `source` is that of the environment, NULL if there is none.
static void launch_check_init_(const Launch* launch, const LaunchSource_* source) {
    if (launch->init != LAUNCH_MPI) {
        die_usage("--init %s, %d processes; for now they meet through MPI: mpirun -n %d ...",
                  launch->init == LAUNCH_TCP ? "tcp" : "fs", launch->place.size, launch->place.size);
    }
    if (!source || source->init != LAUNCH_MPI) {
        die_usage("%d processes, but no launcher of MPI has started this one; wanted mpirun -n %d ...",
                  launch->place.size, launch->place.size);
    }
}

Launch launch_find_in(const Options* options, const char* const* environment) {
    Launch launch = {{0, 1, 0, 1}, LAUNCH_AUTO, ""};
    CommPlace place = launch.place;
    const LaunchSource_* source = launch_read_(environment, &place);
    if (!launch_read_options_(options, &place) && source && !launch_makes_sense_(place)) {
        launch_refuse_(source, environment);
    }
    if (place.size > 1) {
        launch_set_local_(options, &place);
        launch.place = place;
        launch.init = options->init != LAUNCH_AUTO ? (LaunchInit)options->init
                      : source                     ? source->init
                                                   : LAUNCH_MPI;
        launch_check_init_(&launch, source);
        launch.launcher = source->launcher;
    }
    return launch;
}

Launch launch_find(const Options* options) { return launch_find_in(options, (const char* const*)environ); }

CommPlace launch_expect(void) {
    const CommPlace alone = {0, 1, 0, 1};
    CommPlace place = alone;
    launch_read_((const char* const*)environ, &place);
    return launch_makes_sense_(place) ? place : alone;
}

int launch_zero(const Options* options, int size) {
    const int is_cpu = options->program.trainer == OPTION_CPU;
    if (options->zero == OPTION_AUTO) {
        return size > 1 ? 2 : 0;
    }
    if (is_cpu && options->zero == 3) {
        die_usage("--zero 3 is for GPUs, whose memory the parameters have to fit; wanted 0, 1 or 2");
    }
    return options->zero;
}

// The processes of a machine, if all have equally many, rank after rank; else all.
static int launch_on_a_machine_(const Options* options, Comm* comm) {
    const int size = options->processes, is_only_plan = comm->size < size;
    int each = is_only_plan ? options->gpus_per_node : comm->local_size;
    each = each == OPTION_AUTO ? size : each;
    const int is_regular =
        size % each == 0 && (is_only_plan || (comm->nodes == size / each && comm->node == comm->rank / each));
    return comm_any(comm, !is_regular) ? size : each;
}

int launch_shards(const Options* options, Comm* comm) {
    const int size = options->processes, each = launch_on_a_machine_(options, comm);
    if (options->program.trainer == OPTION_CPU) {
        return size; // one level
    }
    if (options->shard_ranks == OPTION_AUTO) {
        return each;
    }
    if (size % options->shard_ranks != 0) {
        die_usage("--shard-ranks %d, %d processes; wanted a number that divides these", options->shard_ranks,
                  size);
    }
    return options->shard_ranks;
}

#endif // LAUNCH_IMPLEMENTATION

#endif
