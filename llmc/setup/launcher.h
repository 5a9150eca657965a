/*
launcher.h -- finds this process's rank, by the command line or the launcher, and how ranks meet.

The first source that is set counts:

    source       rank, size, local rank, local size
    options      --rank, --num-processes; local: --rank mod --gpus-per-node
    mpirun       OMPI_COMM_WORLD_RANK _SIZE _LOCAL_RANK _LOCAL_SIZE     Open MPI, Kubernetes' MPIJob
    mpiexec      PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS      MPICH, Intel MPI
    srun         SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID        in a step of several tasks
    torchrun     RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
    none         0 of 1

A source that is incomplete, or whose numbers make no sense, is refused with its names and values.

--init says how the ranks meet. With auto it is the first of these that applies; CommMeeting has the
place where rank 0 waits:

    mpi     MPI started the ranks: mpirun, mpiexec, or srun if it provides PMI (srun --mpi=)
    tcp     srun, torchrun, or --server is given. Rank 0 waits at --server HOST[:PORT], by default
            port 29500; srun: on the first machine of the step, at a port derived from the job;
            torchrun: at MASTER_ADDR, MASTER_PORT + 1
    fs      otherwise. Rank 0 writes its address to meeting.txt in --fs-path, by default --out

tcp and fs are for GPUs, which exchange data by NCCL. Ranks on CPUs exchange theirs by MPI.
*/
#ifndef LLMC_LAUNCHER_H
#define LLMC_LAUNCHER_H

#include "llmc/base/enum_words.h"
#include "llmc/comm/comm.h"
#include "llmc/parallel/grid.h"
#include "llmc/setup/options.h"

#ifdef __cplusplus
extern "C" {
#endif

// Ways for ranks to meet, for --init.
// clang-format off
#define LAUNCHER_INIT_WORDS(X) \
    X(LAUNCHER_AUTO, "auto") \
    X(LAUNCHER_MPI, "mpi") \
    X(LAUNCHER_TCP, "tcp") \
    X(LAUNCHER_FS, "fs")
// clang-format on
typedef enum { LAUNCHER_INIT_WORDS(WORDS_VALUE) } LaunchInit;

typedef struct {
    CommPlace place;
    LaunchInit init;      // never LAUNCHER_AUTO if the run has several ranks
    const char* launcher; // for example "mpirun"; "": no launcher started this process
    CommMeeting meeting;  // empty for MPI
} Launcher;

// Place of this process in a run, and how the run is divided among all.
typedef struct {
    Grid grid;
    int zero;       // ZeRO stage
    int shards;     // ranks of a data group that share one replica (zero.h)
    int node_ranks; // ranks of a machine; all if machines differ
} Ranks;

// Return all processes of a run, and the number of this one.
static inline int ranks_size(const Ranks* ranks) { return grid_size(ranks->grid.shape); }
static inline int ranks_rank(const Ranks* ranks) { return grid_rank(&ranks->grid); }

// Returns the place in the group in which ZeRO divides.
static inline GridMember ranks_data(const Ranks* ranks) { return grid_member(&ranks->grid, GRID_DATA); }

// Returns the launcher that the options and the environment describe. Ends the program if they make
// no sense.
Launcher launcher_find(const Options* options);

// Implements launcher_find, with `environment`: strings "NAME=value", ending with NULL.
Launcher launcher_find_in(const Options* options, const char* const* environment);

// Returns true in the script of a Slurm job with several tasks. Only processes that srun starts
// share a run.
int launcher_forgets_srun(const char* const* environment);

// Returns the place that the environment alone gives, for comm_expect; rank 0 of 1 if it makes no
// sense, which launcher_find reports later.
CommPlace launcher_expect(void);

// Returns the place of a rank in the grid of `size` processes. Ends the program if they cannot be
// divided as the options say. Whether the model can is checked later (setup_check_grid).
Grid launcher_grid(const Options* options, int rank, int size);

// Returns the ZeRO stage of --zero; auto is 2 for a data group of several ranks, 1 in a pipeline,
// else 0.
int launcher_zero(const Options* options, const Grid* grid);

// Returns --shard-ranks. auto: the number of ranks that a data group has on each machine, if all
// machines have equally many and number them consecutively; else all ranks of the group.
// Collective. In a plan without its ranks (comm->size 1), --gpus-per-node says it.
int launcher_shards(const Options* options, const Grid* grid, Comm* comm);

// Returns the number of ranks on a machine, if all machines have equally many and number them
// consecutively; else `size`. Collective.
int launcher_node_ranks(const Options* options, int size, Comm* comm);

#ifdef __cplusplus
}
#endif

#ifdef LAUNCHER_IMPLEMENTATION

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/xxh64.h"

extern char** environ;

enum { LAUNCHER_PORT_ = 29500, LAUNCHER_SRUN_PORT_ = 20000, LAUNCHER_SRUN_PORTS_ = 10000 };

typedef struct {
    const char *launcher, *names[4]; // variables of rank, size, local rank, local size
    LaunchInit init;
    const char* job[2]; // variables that tell jobs of this launcher apart
} LaunchSource_;

// clang-format off
static const LaunchSource_ LAUNCHER_SOURCES_[] = {
    {"mpirun",   {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                  "OMPI_COMM_WORLD_LOCAL_SIZE"},                              LAUNCHER_MPI, {"", ""}},
    {"mpiexec",  {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}, LAUNCHER_MPI, {"", ""}},
    {"srun",     {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""}, LAUNCHER_TCP,
                 {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
    {"torchrun", {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},    LAUNCHER_TCP,
                 {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
};
// clang-format on
enum { LAUNCHER_SOURCES_COUNT_ = sizeof(LAUNCHER_SOURCES_) / sizeof(LAUNCHER_SOURCES_[0]) };

// Returns the value of a variable; NULL if it is not set.
static const char* launcher_variable_(const char* const* environment, const char* name) {
    const size_t length = strlen(name);
    for (; length && *environment; environment++) {
        if (strncmp(*environment, name, length) == 0 && (*environment)[length] == '=') {
            return *environment + length + 1;
        }
    }
    return NULL;
}

// Returns true if the source counts. torchrun may itself be started by another launcher; then
// torchrun counts, because it started this process. Slurm also sets the
// variables of a job in its scripts; only a task of a step has the variables of a step.
static int launcher_is_there_(const LaunchSource_* source, const char* const* environment) {
    const char* size = launcher_variable_(environment, source->names[1]);
    if (launcher_variable_(environment, "TORCHELASTIC_RUN_ID") && strcmp(source->launcher, "torchrun") != 0) {
        return 0;
    }
    if (strcmp(source->launcher, "srun") == 0) {
        return launcher_variable_(environment, "SLURM_STEP_ID") && size && strcmp(size, "1") != 0;
    }
    return size || launcher_variable_(environment, source->names[0]);
}

// Returns the value of `text`, a number from 0 on; -1 if it is not one.
static int launcher_number_(const char* text) {
    errno = 0;
    const long number =
        text && *text && strspn(text, "0123456789") == strlen(text) ? strtol(text, NULL, 10) : -1;
    return errno == 0 && number <= INT_MAX ? (int)number : -1;
}

static int launcher_makes_sense_(CommPlace place) {
    return place.rank >= 0 && place.rank < place.size && place.local_rank < place.size &&
           (place.local_size < 0 || (place.local_size > place.local_rank && place.local_size <= place.size));
}

// Ends the program; says which variables the source sets, and to what.
__attribute__((noreturn)) static void launcher_refuse_(const LaunchSource_* source,
                                                       const char* const* environment) {
    char found[512] = "";
    size_t used = 0;
    for (int i = 0; i < 4 && used < sizeof(found); i++) {
        const char* value = launcher_variable_(environment, source->names[i]);
        if (*source->names[i]) {
            used += (size_t)snprintf(found + used, sizeof(found) - used, " %s%s%s", source->names[i],
                                     value ? "=" : "", value ? value : " is not set,");
        }
    }
    die_usage("%s says which process this is:%s; wanted a rank below the size, and a local rank below the "
              "local size, or --num-processes 1 for a run of this process alone",
              source->launcher, found);
}

// Reads the place from the first source that is set, even if it makes no sense. Returns the source;
// NULL: none.
static const LaunchSource_* launcher_read_(const char* const* environment, CommPlace* place) {
    for (int i = 0; i < LAUNCHER_SOURCES_COUNT_; i++) {
        const LaunchSource_* source = &LAUNCHER_SOURCES_[i];
        int values[4], is_legal = 1;
        if (!launcher_is_there_(source, environment)) {
            continue;
        }
        for (int k = 0; k < 4; k++) {
            const char* text = launcher_variable_(environment, source->names[k]);
            values[k] = launcher_number_(text);
            is_legal = is_legal && (!text || values[k] >= 0);
        }
        const CommPlace read = {is_legal ? values[0] : -1, values[1], values[2], values[3]};
        *place = read;
        return source;
    }
    return NULL;
}

// Reads --rank and --num-processes. Returns true if they are given.
static int launcher_read_options_(const Options* options, CommPlace* place) {
    const int rank = options->ranks.rank, size = options->ranks.processes;
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

// Sets the local rank by --gpus-per-node, if the launcher does not. The last machine may have fewer
// ranks.
static void launcher_set_local_(const Options* options, CommPlace* place) {
    const int each = options->ranks.per_node;
    if (each != OPTION_AUTO && place->local_rank < 0) {
        const int first = place->rank / each * each;
        place->local_rank = place->rank - first;
        place->local_size = place->size - first < each ? place->size - first : each;
    }
}

// ---- how the ranks meet ----

// Decides --init auto. srun provides PMI if it has set PMI's variables.
static LaunchInit launcher_auto_init_(const Options* options, const LaunchSource_* source,
                                      const char* const* environment) {
    if (!source) {
        return *options->ranks.server ? LAUNCHER_TCP : LAUNCHER_FS;
    }
    return launcher_variable_(environment, "PMIX_RANK") || launcher_variable_(environment, "PMI_FD")
               ? LAUNCHER_MPI
               : source->init;
}

// Refuses MPI if it did not start this process, and everything but MPI on a CPU.
static void launcher_check_init_(const Launcher* launch, const LaunchSource_* source,
                                 const Options* options) {
    const int size = launch->place.size, is_srun = source && strcmp(source->launcher, "srun") == 0;
    if (launch->init == LAUNCHER_MPI && !is_srun && (!source || source->init != LAUNCHER_MPI)) {
        die_usage("%d processes, but no launcher of MPI has started this one; wanted mpirun -n %d ...", size,
                  size);
    }
    if (launch->init != LAUNCHER_MPI && options->program.trainer == OPTION_CPU) {
        die_usage("%d processes%s%s: CPU runs with several processes need MPI; start them with "
                  "mpirun -n %d ...%s, or --num-processes 1 for a run of this process alone",
                  size, source ? " of " : "", source ? source->launcher : "", size,
                  is_srun ? ", srun --mpi=pmix" : "");
    }
}

// Sets `host` to the first machine of a list: "node07" of "node[07-12,20],other".
static void launcher_first_host_(char* host, size_t room, const char* list) {
    size_t used = 0;
    for (const char* at = list; *at && *at != ',' && used + 1 < room; at++) {
        if (*at == '[') {
            const size_t first = strcspn(at + 1, "-,]");
            used += (size_t)snprintf(host + used, room - used, "%.*s", (int)first, at + 1);
            at += strcspn(at, "]");
            used = used < room ? used : room - 1;
            at -= !*at; // the list ends without a bracket
        } else {
            host[used++] = *at;
        }
    }
    host[used] = '\0';
}

// Reads --server: "node1", "node1:29501" or "[fe80::1]:29501". An IPv6 address without a port needs
// no brackets.
static void launcher_read_server_(CommMeeting* m, const char* server) {
    const int is_bracketed = *server == '[';
    const char *host = server + is_bracketed, *colon = strchr(host, ':');
    size_t length = is_bracketed ? strcspn(host, "]") : strcspn(host, ":");
    const char* rest = host + length + (is_bracketed && host[length]); // ":29501"
    if (!is_bracketed && colon && strchr(colon + 1, ':')) {
        length = strlen(host);
        rest = "";
    }
    m->port = *rest == ':' ? launcher_number_(rest + 1) : *rest ? -1 : LAUNCHER_PORT_;
    snprintf(m->host, sizeof(m->host), "%.*s", (int)length, host);
    if (!*m->host || m->port < 1 || m->port > 65535) {
        die_usage("--server %s; wanted HOST or HOST:PORT, a port from 1 to 65535", server);
    }
}

// Reads where rank 0 waits under torchrun, whose own agent listens at MASTER_PORT.
static void launcher_read_master_(CommMeeting* m, const char* const* environment) {
    const char *address = launcher_variable_(environment, "MASTER_ADDR"),
               *port = launcher_variable_(environment, "MASTER_PORT");
    m->port = launcher_number_(port) + 1;
    snprintf(m->host, sizeof(m->host), "%s", address ? address : "");
    if (!*m->host || m->port < 2 || m->port > 65535) {
        die_usage(
            "torchrun says where rank 0 is: MASTER_ADDR=%s MASTER_PORT=%s; wanted a host and a port below "
            "65535, or --server HOST:PORT",
            address ? address : "", port ? port : "");
    }
}

// Reads where rank 0 waits under srun. Slurm gives no port, so it is derived from the job: jobs
// that run at the same time get different ones.
static void launcher_read_step_(CommMeeting* m, const char* const* environment) {
    const char* list = launcher_variable_(environment, "SLURM_STEP_NODELIST");
    launcher_first_host_(m->host, sizeof(m->host), list ? list : "");
    m->port = LAUNCHER_SRUN_PORT_ + (int)(xxh64(m->job, strlen(m->job)) % LAUNCHER_SRUN_PORTS_);
    if (!*m->host) {
        die_usage(
            "srun does not say where rank 0 is: SLURM_STEP_NODELIST is not set; wanted --server HOST:PORT");
    }
}

static void launcher_read_job_(CommMeeting* m, const LaunchSource_* source, const char* const* environment) {
    const char* values[2];
    for (int i = 0; i < 2; i++) {
        values[i] = source ? launcher_variable_(environment, source->job[i]) : NULL;
    }
    if (values[0]) {
        snprintf(m->job, sizeof(m->job), "%s %s.%s", source->launcher, values[0],
                 values[1] ? values[1] : "0");
    }
}

// Finds where rank 0 waits.
static void launcher_find_meeting_(Launcher* launch, const LaunchSource_* source, const Options* options,
                                   const char* const* environment) {
    CommMeeting* m = &launch->meeting;
    launcher_read_job_(m, source, environment);
    if (launch->init == LAUNCHER_FS) {
        const char* directory = *options->ranks.fs_path ? options->ranks.fs_path : options->output.dir;
        if (!*directory) {
            die_usage("--init fs wants --fs-path DIR, or --out: a directory that all machines share");
        }
        file_join(m->file, directory, "meeting.txt");
    } else if (*options->ranks.server) {
        launcher_read_server_(m, options->ranks.server);
    } else if (source && strcmp(source->launcher, "torchrun") == 0) {
        launcher_read_master_(m, environment);
    } else if (source && strcmp(source->launcher, "srun") == 0) {
        launcher_read_step_(m, environment);
    } else {
        die_usage("--init tcp wants --server HOST[:PORT], where the others reach rank 0");
    }
}

Launcher launcher_find_in(const Options* options, const char* const* environment) {
    Launcher launch;
    CommPlace place = {0, 1, 0, 1};
    memset(&launch, 0, sizeof(launch));
    launch.place = place;
    const LaunchSource_* source = launcher_read_(environment, &place);
    launch.launcher = source ? source->launcher : "";
    const int has_options = launcher_read_options_(options, &place);
    if (!has_options && source && !launcher_makes_sense_(place)) {
        launcher_refuse_(source, environment);
    }
    if (place.size > 1) {
        launcher_set_local_(options, &place);
        launch.place = place;
        launch.launcher = source ? source->launcher : "--rank";
        launch.init = options->ranks.init != LAUNCHER_AUTO
                          ? (LaunchInit)options->ranks.init
                          : launcher_auto_init_(options, source, environment);
        launcher_check_init_(&launch, source, options);
        if (launch.init != LAUNCHER_MPI) {
            launcher_find_meeting_(&launch, source, options, environment);
        }
    }
    return launch;
}

int launcher_forgets_srun(const char* const* environment) {
    CommPlace place;
    return launcher_number_(launcher_variable_(environment, "SLURM_NTASKS")) > 1 &&
           !launcher_variable_(environment, "SLURM_STEP_NUM_TASKS") && !launcher_read_(environment, &place);
}

Launcher launcher_find(const Options* options) {
    const char* const* environment = (const char* const*)environ;
    if (launcher_forgets_srun(environment) && options->ranks.processes == OPTION_AUTO &&
        !options->generates) {
        printf("note: this Slurm job has %s tasks, but srun has not started this process: it runs alone; "
               "srun --mpi=pmix, or --num-processes 1\n",
               getenv("SLURM_NTASKS"));
    }
    return launcher_find_in(options, environment);
}

CommPlace launcher_expect(void) {
    const CommPlace alone = {0, 1, 0, 1};
    CommPlace place = alone;
    launcher_read_((const char* const*)environ, &place);
    return launcher_makes_sense_(place) ? place : alone;
}

// ---- the grid ----

Grid launcher_grid(const Options* options, int rank, int size) {
    const GridShape shape = {options->ranks.tensor, options->ranks.context, 0, options->ranks.pipeline,
                             options->ranks.experts};
    const GridRun run = {.ranks = size, .node_ranks = size, .unit = GRID_UNIT};
    char error[GRID_ERROR_BYTES];
    if (!grid_check(shape, &run, error)) {
        die_usage("%s", error);
    }
    return grid_of(grid_complete(shape, size), rank);
}

int launcher_zero(const Options* options, const Grid* grid) {
    const int is_cpu = options->program.trainer == OPTION_CPU;
    if (options->ranks.zero == OPTION_AUTO) {
        return grid_member(grid, GRID_DATA).size == 1 ? 0 : grid->shape.pipeline > 1 ? 1 : 2;
    }
    if (is_cpu && options->ranks.zero == 3) {
        die_usage("--zero 3 is for GPUs, whose memory the parameters have to fit; wanted 0, 1 or 2%s",
                  options->plan
                      ? "; to plan it for GPUs without one: make sim, and build/sim/BF16/train_gpt2cu"
                      : "");
    }
    return options->ranks.zero;
}

int launcher_node_ranks(const Options* options, int size, Comm* comm) {
    const int is_only_plan = comm->size < size;
    int each = is_only_plan ? options->ranks.per_node : comm->local_size;
    each = each == OPTION_AUTO ? size : each;
    const int is_regular =
        size % each == 0 && (is_only_plan || (comm->nodes == size / each && comm->node == comm->rank / each));
    return comm_any(comm, !is_regular) ? size : each;
}

// Returns the number of ranks of a data group on one machine with `each` ranks. Returns the whole
// group if it is on one machine, or if machines have unequal parts of it.
static int launcher_data_on_a_machine_(const Grid* grid, int each) {
    const int t = grid->shape.tensor, size = grid_member(grid, GRID_DATA).size,
              here = each % t == 0 ? each / t : 1;
    return here < size && size % here == 0 ? here : size;
}

int launcher_shards(const Options* options, const Grid* grid, Comm* comm) {
    const int each = launcher_node_ranks(options, grid_size(grid->shape), comm),
              size = grid_member(grid, GRID_DATA).size, here = launcher_data_on_a_machine_(grid, each);
    if (options->program.trainer == OPTION_CPU || grid_experts(grid->shape) > 1) {
        return size; // one level
    }
    if (options->ranks.shards == OPTION_AUTO) {
        // replicas of one rank would each have all parameters
        return here == 1 && grid->shape.tensor > 1 && options->ranks.zero == 3 ? size : here;
    }
    if (size % options->ranks.shards != 0) {
        die_usage("--shard-ranks %d, %d processes%s; wanted a number that divides these",
                  options->ranks.shards, size, size < grid_size(grid->shape) ? " of a data group" : "");
    }
    if (launcher_zero(options, grid) >= 2 && options->ranks.shards > here) {
        printf(
            "note: --shard-ranks %d exchanges every gradient between machines; auto, %d, exchanges the sums "
            "of each machine\n",
            options->ranks.shards, here);
    }
    return options->ranks.shards;
}

#endif // LAUNCHER_IMPLEMENTATION

#endif
