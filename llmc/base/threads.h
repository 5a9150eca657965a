/*
threads.h -- the few questions asked of OpenMP, answered for one thread when it is absent.
*/
#ifndef LLMC_THREADS_H
#define LLMC_THREADS_H

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/limits.h"

#ifdef _OPENMP
#include <omp.h>
#ifdef __linux__
#include <sched.h>
#endif

#include "llmc/base/clock.h"
#include "llmc/base/enum_words.h"

// Undoes OMP_PROC_BIND for the thread that starts a program. OpenMP has bound it to its first place
// by now, and a program inherits the cores that it may use: only these.
static inline void threads_unbind_(void) {
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int place = 0; place < omp_get_num_places(); place++) {
        int cores[CPU_SETSIZE];
        const int count = omp_get_place_num_procs(place);
        if (count > CPU_SETSIZE) {
            return; // more cores than such a set has
        }
        omp_get_place_proc_ids(place, cores);
        for (int i = 0; i < count; i++) {
            CPU_SET(cores[i], &set);
        }
    }
    if (CPU_COUNT(&set) > 0) {
        sched_setaffinity(0, sizeof(set), &set);
    }
#endif
}

// Waiting threads burn their core for milliseconds by default, in the belief that all cores are
// ours. When they are not (a laptop, a shared server), that keeps the very thread waited for from
// running: a step of 0.13 s was seen to take 3.4 s beside one busy process. OpenMP reads its
// settings before main, so the program sets a short wait and starts itself again, once; whoever has
// chosen a setting keeps it.
static inline void threads_wait_briefly(char** argv) {
    if (!getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT") && !getenv("KMP_BLOCKTIME")) {
        setenv("GOMP_SPINCOUNT", "5000", 1); // gcc's runtime: about 50 us
        setenv("KMP_BLOCKTIME", "0", 1);     // clang's
        char program[PATH_MAX];
        const ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
        if (length > 0) { // where there is no such link, things stay as they are
            program[length] = '\0';
            threads_unbind_();
            execv(program, argv);
        }
    }
}

static inline int threads_max(void) { return omp_get_max_threads(); }         // of the next parallel region
static inline int thread_index(void) { return omp_get_thread_num(); }         // 0 ... threads_max() - 1
static inline void threads_set(int threads) { omp_set_num_threads(threads); } // for the rest of the run

// The cores of this job on this machine: those that the parent may use, which is a launcher that
// has bound its children, not itself.
static inline int threads_cores_(void) {
    int cores = 0;
#ifdef __linux__
    cpu_set_t set;
    cores = sched_getaffinity(getppid(), sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 0;
#endif
    return cores > omp_get_num_procs() ? cores : omp_get_num_procs();
}

// Threads of one of `processes` that share these cores, of which it may run on `bound`, and a
// quota.
static inline int threads_share_(int cores, int bound, double quota, int processes) {
    const int most = ceil(quota) < cores ? (int)ceil(quota) : cores, share = most / processes;
    return share < 1 ? 1 : share < bound ? share : bound;
}

// --threads of one of `processes` on this machine. 0: those of OMP_NUM_THREADS, else its share of
// the cores, as far as a quota and the launcher ("": none has started it) let it use them. A note
// says if a quota or mpirun leaves less: whoever calls srun has chosen a number of cores.
static inline void threads_open(int threads, int processes, const char* launcher) {
    const int is_given = limits_omp_threads() > 0, bound = omp_get_num_procs();
    if (threads || is_given) {
        threads_set(threads ? threads : threads_max());
        return;
    }
    const int cores = *launcher ? threads_cores_() : bound;
    const double quota = limits_quota("");
    if (ceil(quota) < cores) {
        printf("note: a quota of %g of %d cores, by a control group of this job; --threads sets another "
               "number\n",
               quota, cores);
    }
    threads_set(threads_share_(cores, bound, quota, processes));
    if (threads_max() < threads_share_(cores, cores, quota, processes) && strncmp(launcher, "mpi", 3) == 0) {
        printf("note: bound to %d of %d cores by %s; %s %sbind-to none\n", bound, cores, launcher, launcher,
               strcmp(launcher, "mpirun") == 0 ? "--" : "-");
    }
}

// "2 threads"
static inline void threads_describe(char* text, size_t room) {
    snprintf(text, room, "%d thread%s", threads_max(), words_s(threads_max()));
}

// The system may start two threads on one core and leave them there for tens of milliseconds.
// Returns when each has run on a core of its own for 2 ms, at the latest after 0.1 s; at once if
// there are more threads than cores.
static inline void threads_spread(void) {
#ifdef __linux__
    enum { ROUNDS = 4 }; // of 0.5 ms
    const int threads = threads_max();
    const double begin_s = time_now_s();
    for (int apart = 0; apart < ROUNDS && threads <= omp_get_num_procs() && time_now_s() - begin_s < 0.1;) {
        cpu_set_t cores;
        CPU_ZERO(&cores);
#pragma omp parallel
        {
            const double start_s = time_now_s();
            while (time_now_s() - start_s < 0.0005) {
            }
            const int core = sched_getcpu();
#pragma omp critical
            CPU_SET(core, &cores);
        }
        apart = CPU_COUNT(&cores) == threads ? apart + 1 : 0;
    }
#endif
}
#else
static inline int threads_max(void) { return 1; }
static inline void threads_spread(void) {}
static inline int thread_index(void) { return 0; }
static inline void threads_set(int threads) { (void)threads; }
static inline void threads_open(int threads, int processes, const char* launcher) {
    (void)processes, (void)launcher;
    if (threads > 1) {
        die_usage("--threads %d: this program was built without OpenMP, for one thread; wanted --threads 1, "
                  "or a build "
                  "with OPENMP=-fopenmp",
                  threads);
    }
}
static inline void threads_describe(char* text, size_t room) {
    snprintf(text, room, "1 thread (built without OpenMP)");
}
static inline void threads_wait_briefly(char** argv) { (void)argv; }
#endif

#endif
