/*
threads.h -- the few questions asked of OpenMP, answered for one thread when it is absent.

defines: threads_max, thread_index, threads_set, threads_open, threads_spread, threads_wait_briefly
*/
#ifndef LLMC_THREADS_H
#define LLMC_THREADS_H

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#ifdef __linux__
#include <sched.h>
#endif

#include "llmc/base/clock.h"

// Undoes OMP_PROC_BIND for the thread that starts a program. OpenMP has bound it to its first place by now, and a program
// inherits the cores that it may use: only these.
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

// Waiting threads burn their core for milliseconds by default, in the belief that all cores are ours. When
// they are not (a laptop, a shared server), that keeps the very thread waited for from running: a step of
// 0.13 s was seen to take 3.4 s beside one busy process. OpenMP reads its settings before main, so the
// program sets a short wait and starts itself again, once; whoever has chosen a setting keeps it.
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

// The cores of this job on this machine: those that the parent may use, which is a launcher that has bound its
// children, not itself.
static inline int threads_cores_(void) {
    int cores = 0;
#ifdef __linux__
    cpu_set_t set;
    cores = sched_getaffinity(getppid(), sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 0;
#endif
    return cores > omp_get_num_procs() ? cores : omp_get_num_procs();
}

// --threads of one of `processes` on this machine. 0: those of OMP_NUM_THREADS, else its share of the cores, as
// far as the launcher lets it use them; a note says if that is less.
static inline void threads_open(int threads, int processes) {
    if (threads) {
        threads_set(threads);
    } else if (processes > 1 && !getenv("OMP_NUM_THREADS")) {
        const int cores = threads_cores_(), bound = omp_get_num_procs();
        const int share = cores > processes ? cores / processes : 1;
        if (bound < share) {
            printf("note: bound to %d of %d cores by the launcher; mpirun --bind-to none\n", bound, cores);
        }
        threads_set(bound < share ? bound : share);
    }
}

// The system may start two threads on one core and leave them there for tens of milliseconds. Returns when each has run on a
// core of its own for 2 ms, at the latest after 0.1 s; at once if there are more threads than cores.
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
static inline void threads_open(int threads, int processes) { (void)threads, (void)processes; }
static inline void threads_wait_briefly(char** argv) { (void)argv; }
#endif

#endif
