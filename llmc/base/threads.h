/*
threads.h -- the few questions asked of OpenMP, answered for one thread when it is absent.

defines: threads_max, thread_index, threads_set, threads_wait_briefly
*/
#ifndef LLMC_THREADS_H
#define LLMC_THREADS_H

#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>

// Waiting threads burn their core for milliseconds by default, in the belief that all cores are ours. When
// they are not (a laptop, a shared server), that keeps the very thread waited for from running: a step of
// 0.13 s was seen to take 3.4 s beside one busy process. OpenMP reads its settings before main, so the
// program sets a short wait and starts itself again, once; whoever has chosen a setting keeps it.
static inline void threads_wait_briefly(char** argv) {
    if (!getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT") && !getenv("KMP_BLOCKTIME")) {
        setenv("GOMP_SPINCOUNT", "1000", 1); // gcc's runtime: about 10 us
        setenv("KMP_BLOCKTIME", "0", 1);     // clang's
        char program[PATH_MAX];
        const ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
        if (length > 0) { // where there is no such link, things stay as they are
            program[length] = '\0';
            execv(program, argv);
        }
    }
}

static inline int threads_max(void) { return omp_get_max_threads(); }         // of the next parallel region
static inline int thread_index(void) { return omp_get_thread_num(); }         // 0 ... threads_max() - 1
static inline void threads_set(int threads) { omp_set_num_threads(threads); } // for the rest of the run
#else
static inline int threads_max(void) { return 1; }
static inline int thread_index(void) { return 0; }
static inline void threads_set(int threads) { (void)threads; }
static inline void threads_wait_briefly(char** argv) { (void)argv; }
#endif

#endif
