// gpu_ranks.h -- runs a test on ranks: each is a child of this process with its own GPU. A machine
// with one GPU has one rank.
#ifndef LLMC_TEST_GPU_RANKS_H
#define LLMC_TEST_GPU_RANKS_H

#include <sys/wait.h>
#include <unistd.h>

#include "llmc/comm/comm.h"
#include "llmc/comm/comm_nccl.cuh"
#include "llmc/gpu/gpu.cuh"
#include "dev/test/lib/test.h"

typedef void (*GpuRank)(Comm* comm, const Gpu* gpu);

static inline CommMeeting gpu_ranks_meeting_(int size) {
    CommMeeting meeting;
    char name[32];
    memset(&meeting, 0, sizeof(meeting));
    snprintf(name, sizeof(name), "ranks_of_%d", size);
    snprintf(meeting.file, sizeof(meeting.file), "%s", test_path(name));
    return meeting;
}

__attribute__((noreturn)) static inline void gpu_ranks_main_(int rank, int size, const CommMeeting* meeting,
                                                             GpuRank test) {
    const CommPlace place = {rank, size, -1, -1};
    Comm comm;
    Gpu gpu;
    comm_expect(&comm, place);
    comm_open(&comm, place, meeting, 60);
    gpu_open(&gpu, gpu_device_of_rank(&comm, -1));
    test(&comm, &gpu);
    gpu_close(&gpu);
    comm_close(&comm);
    exit(test_failures_ > 0);
}

// The exit status of a child that calls this.
static inline int gpu_ranks_status_(pid_t child) {
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static inline void gpu_ranks_test_(int size, GpuRank test) {
    const CommMeeting meeting = gpu_ranks_meeting_(size);
    pid_t ranks[4];
    fflush(stdout);
    for (int r = 0; r < size; r++) {
        ranks[r] = fork();
        if (ranks[r] == 0) {
            gpu_ranks_main_(r, size, &meeting, test);
        }
    }
    for (int r = 0; r < size; r++) {
        const int status = gpu_ranks_status_(ranks[r]);
        EXPECT(status == 0, "rank %d of %d: exit status %d", r, size, status);
    }
}

// Asked in a child: after a fork a process can use no GPU that its parent has used.
static inline int gpu_ranks_gpus_(void) {
    const pid_t child = fork();
    if (child == 0) {
        int devices = 0;
        _exit(cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0);
    }
    return gpu_ranks_status_(child);
}

// Runs the test on 1, 2 and 4 ranks, as far as the machine has GPUs.
static inline void gpu_ranks_test(GpuRank test) {
    const int gpus = gpu_ranks_gpus_();
    EXPECT(gpus > 0, "no GPU");
    gpu_ranks_test_(1, test);
#ifdef HAVE_NCCL
    for (int size = 2; size <= 4 && size <= gpus; size *= 2) {
        gpu_ranks_test_(size, test);
    }
#endif
}

#endif
