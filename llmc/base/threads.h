/*
threads.h -- the few functions of OpenMP that the program uses; one thread if it is absent.
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

// Undoes OMP_PROC_BIND for the thread that starts a program. By now OpenMP has bound it to its
// first place, and the new program would inherit only those cores.
static inline void threads_unbind_(void) {
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int place = 0; place < omp_get_num_places(); place++) {
        int cores[CPU_SETSIZE];
        const int count = omp_get_place_num_procs(place);
        if (count > CPU_SETSIZE) {
            return; // more cores than a cpu_set_t holds
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

// Makes waiting threads sleep soon, by setting OpenMP's variables and starting the program again,
// once: OpenMP reads them before main. By default waiting threads spin for milliseconds, as if all
// cores were ours. On a laptop or a shared server that delays the very thread they wait for: beside
// one busy process, a step of 0.13 s took 3.4 s. A setting of the user's is kept.
static inline void threads_wait_briefly(char** argv) {
    if (!getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT") && !getenv("KMP_BLOCKTIME")) {
        setenv("GOMP_SPINCOUNT", "5000", 1); // gcc's runtime: about 50 us
        setenv("KMP_BLOCKTIME", "0", 1);     // clang's
        char program[PATH_MAX];
        const ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
        if (length > 0) { // without such a link, nothing changes
            program[length] = '\0';
            threads_unbind_();
            execv(program, argv);
        }
    }
}

// of the next parallel region
static inline int threads_max(void) { return omp_get_max_threads(); }
// 0 ... threads_max() - 1
static inline int thread_index(void) { return omp_get_thread_num(); }
// for the rest of the run
static inline void threads_set(int threads) { omp_set_num_threads(threads); }

// Returns the cores of this job on this machine: the parent's, since a launcher binds its children
// but not itself.
static inline int threads_cores_(void) {
    int cores = 0;
#ifdef __linux__
    cpu_set_t set;
    cores = sched_getaffinity(getppid(), sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 0;
#endif
    return cores > omp_get_num_procs() ? cores : omp_get_num_procs();
}

// Returns the number of threads of a process that shares these cores with others, `processes` in
// all, under a quota. This one may run on `bound` of the cores.
static inline int threads_share_(int cores, int bound, double quota, int processes) {
    const int most = ceil(quota) < cores ? (int)ceil(quota) : cores, share = most / processes;
    return share < 1 ? 1 : share < bound ? share : bound;
}

// Sets --threads for one of `processes` on this machine. 0 means OMP_NUM_THREADS, else its share of
// the cores, as far as a quota and the launcher ("" if none) allow. Prints a note if a quota or
// mpirun allows fewer; a user of srun has chosen the number.
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

// Sets text to "2 threads".
static inline void threads_describe(char* text, size_t room) {
    snprintf(text, room, "%d thread%s", threads_max(), words_s(threads_max()));
}

// Waits until each thread has run on a core of its own for 2 ms, at most 0.1 s; returns at once if
// threads outnumber cores. The system may start two threads on one core and leave them there for
// tens of milliseconds.
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
