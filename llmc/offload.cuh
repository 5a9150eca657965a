/*
offload.cuh -- AdamW with master weights, m and v in pinned memory of the host: they pass through the GPU in chunks.

    master, m, v   (owned)   fp32, on the host; master NULL: there are none

A chunk is copied in, updated and copied out by three streams that wait for each other by events, so that the bus works
in both directions while the GPU computes. It is the same kernel on the same elements as without: the same bits. An update
moves 12 bytes a parameter in and 12 out (8 without master weights).

What the host reads of them must wait for offload_wait.

defines: Offload, OFFLOAD_CHUNK, offload_planned_bytes, offload_open, offload_close, offload_adamw_update, offload_wait
*/
#ifndef LLMC_OFFLOAD_CUH
#define LLMC_OFFLOAD_CUH

#include <assert.h>
#include <string.h>

#include "llmc/adamw.cuh"
#include "llmc/gpu.cuh"
#include "llmc/gpt2.h"

#ifndef OFFLOAD_CHUNK
#define OFFLOAD_CHUNK ((size_t)4 << 20) // elements; a multiple of GPT2_SHARD_UNIT
#endif
enum { OFFLOAD_SLOTS_ = 3, OFFLOAD_ARRAYS_ = 3 }; // chunks on the GPU at a time; master, m, v

typedef struct {
    float* slots; // (OFFLOAD_SLOTS_, OFFLOAD_ARRAYS_, OFFLOAD_CHUNK) on the GPU; NULL: nothing is offloaded
    cudaStream_t in, out; // copies from and to the host
    cudaEvent_t filled[OFFLOAD_SLOTS_], updated[OFFLOAD_SLOTS_], emptied[OFFLOAD_SLOTS_];
} Offload;

// On the GPU.
static inline size_t offload_planned_bytes(void) {
    return OFFLOAD_SLOTS_ * OFFLOAD_ARRAYS_ * OFFLOAD_CHUNK * sizeof(float);
}

static inline void offload_open(Offload* o) {
    memset(o, 0, sizeof(*o));
    o->slots = (float*)gpu_alloc(offload_planned_bytes(), 1, "chunks of the optimizer's state");
    CUDA_CHECK(cudaStreamCreateWithFlags(&o->in, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&o->out, cudaStreamNonBlocking));
    for (int s = 0; s < OFFLOAD_SLOTS_; s++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&o->filled[s], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&o->updated[s], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&o->emptied[s], cudaEventDisableTiming));
    }
}

// After offload_wait.
static inline void offload_close(Offload* o) {
    for (int s = 0; s < OFFLOAD_SLOTS_; s++) {
        CUDA_CHECK(cudaEventDestroy(o->emptied[s]));
        CUDA_CHECK(cudaEventDestroy(o->updated[s]));
        CUDA_CHECK(cudaEventDestroy(o->filled[s]));
    }
    CUDA_CHECK(cudaStreamDestroy(o->out));
    CUDA_CHECK(cudaStreamDestroy(o->in));
    gpu_free(o->slots);
}

static inline float* offload_slot_(const Offload* o, int slot, int array) {
    return o->slots + ((size_t)slot * OFFLOAD_ARRAYS_ + (size_t)array) * OFFLOAD_CHUNK;
}

// Copies a chunk between its slot and the host.
static inline void offload_copy_(const Offload* o, int slot, float* const host[OFFLOAD_ARRAYS_], size_t first,
                                 size_t count, cudaMemcpyKind kind) {
    for (int a = 0; a < OFFLOAD_ARRAYS_; a++) {
        float *there = host[a] ? host[a] + first : NULL, *here = offload_slot_(o, slot, a);
        const int fills = kind == cudaMemcpyHostToDevice;
        if (there) {
            CUDA_CHECK(cudaMemcpyAsync(fills ? here : there, fills ? there : here, count * sizeof(float),
                                       kind, fills ? o->in : o->out));
        }
    }
}

// As adamw_update, with master, m and v on the host. Queues all of it.
template <class T>
static inline void offload_adamw_update(Offload* o, T* params, float* master, Gradient grads, float* m,
                                        float* v, const AdamWPlan* plan, AdamW opt, uint64_t seed,
                                        const Gpu* gpu) {
    float* const host[OFFLOAD_ARRAYS_] = {master, m, v};
    const size_t owned = (size_t)plan->pieces.count * GPT2_SHARD_UNIT;
    for (size_t first = 0, k = 0; first < owned; first += OFFLOAD_CHUNK, k++) {
        const size_t count = owned - first < OFFLOAD_CHUNK ? owned - first : OFFLOAD_CHUNK;
        const int slot = (int)(k % OFFLOAD_SLOTS_);
        // What was in the slot: three chunks before, or in the last update.
        CUDA_CHECK(cudaStreamWaitEvent(o->in, o->emptied[slot], 0));
        offload_copy_(o, slot, host, first, count, cudaMemcpyHostToDevice);
        CUDA_CHECK(cudaEventRecord(o->filled[slot], o->in));
        CUDA_CHECK(cudaStreamWaitEvent(gpu->stream, o->filled[slot], 0));
        adamw_update_part(params, master ? offload_slot_(o, slot, 0) : NULL, grads, offload_slot_(o, slot, 1),
                          offload_slot_(o, slot, 2), plan, first, count, opt, seed, gpu);
        CUDA_CHECK(cudaEventRecord(o->updated[slot], gpu->stream));
        CUDA_CHECK(cudaStreamWaitEvent(o->out, o->updated[slot], 0));
        offload_copy_(o, slot, host, first, count, cudaMemcpyDeviceToHost);
        CUDA_CHECK(cudaEventRecord(o->emptied[slot], o->out));
    }
}

// Until what the last update wrote is on the host.
static inline void offload_wait(const Offload* o) {
    if (o->slots) {
        CUDA_CHECK(cudaStreamSynchronize(o->out));
    }
}

#endif
