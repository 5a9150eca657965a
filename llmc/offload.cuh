/*
offload.cuh -- what is on the host between its uses: the optimizer's state and the residual stream.

AdamW with m, v and master weights in pinned memory or in a file: they pass through the GPU in chunks.

    m, v, master   (3, owned)   fp32, one after another; without master weights (2, owned)

A chunk is copied in, updated and copied out by three streams that wait for each other by events, so that the bus works
in both directions while the GPU computes. It is the same kernel on the same elements as without: the same bits. An update
moves 12 bytes a parameter in and 12 out (8 without master weights).

On a disk the arrays are a file of scratch.h. A chunk then has a place in pinned memory, too: threads read the next chunk
and write the last ones while one is on the GPU. Chunk k always has the same place, so whoever waits for the place has
waited for that part of the file.

Where the residual stream is all that is kept of a block (RECOMPUTE_BLOCK), it can be in pinned memory, too. The blocks
take two buffers in turn. What block l adds up goes out beside block l + 1, and comes back beside the backward pass of
block l + 2: it is needed in that of block l + 1. The last two stay. In a micro-step the main stream waits for every copy,
so that it can be one CUDA graph.

needs:   all sizes of the optimizer's state are multiples of SCRATCH_UNIT bytes, as those of shards are
defines: Offload, OFFLOAD_CHUNK, offload_planned_bytes, offload_places_bytes, offload_open, offload_close,
         offload_adamw_update, offload_state_bytes, offload_read, offload_write, offload_master, offload_wait,
         OffloadResiduals, OFFLOAD_RESIDUALS, offload_residual_layers, offload_residuals_open, offload_residuals_close,
         offload_residual_out, offload_residual_in, offload_residual_wait
*/
#ifndef LLMC_OFFLOAD_CUH
#define LLMC_OFFLOAD_CUH

#include <assert.h>
#include <string.h>

#include "llmc/base/scratch.h"
#include "llmc/adamw.cuh"
#include "llmc/gpu.cuh"

#ifndef OFFLOAD_CHUNK
#define OFFLOAD_CHUNK ((size_t)4 << 20) // elements; a multiple of GPT2_SHARD_UNIT
#endif
// Chunks on the GPU at a time; places of chunks between it and a disk; m, v and master weights.
enum { OFFLOAD_SLOTS_ = 3, OFFLOAD_PLACES_ = 4, OFFLOAD_ARRAYS_ = 3 };

typedef struct {
    size_t owned;  // elements of an array
    int arrays;    // 3, or 2 without master weights
    float* host;   // (arrays, owned) pinned; with a disk (OFFLOAD_PLACES_, arrays, OFFLOAD_CHUNK)
    Scratch* disk; // (arrays, owned); NULL: there is none
    ScratchWork work[OFFLOAD_PLACES_];
    float* slots;         // (OFFLOAD_SLOTS_, arrays, OFFLOAD_CHUNK) on the GPU; NULL: nothing is offloaded
    cudaStream_t in, out; // copies from and to the host
    cudaEvent_t filled[OFFLOAD_SLOTS_], updated[OFFLOAD_SLOTS_], emptied[OFFLOAD_SLOTS_];
} Offload;

// ---- memory ----

static inline int offload_arrays_(int has_master) {
    return has_master ? OFFLOAD_ARRAYS_ : OFFLOAD_ARRAYS_ - 1;
}

// On the GPU.
static inline size_t offload_planned_bytes(int has_master) {
    return OFFLOAD_SLOTS_ * (size_t)offload_arrays_(has_master) * OFFLOAD_CHUNK * sizeof(float);
}

// Pinned memory between the GPU and a disk.
static inline size_t offload_places_bytes(int has_master) {
    return OFFLOAD_PLACES_ * (size_t)offload_arrays_(has_master) * OFFLOAD_CHUNK * sizeof(float);
}

static inline size_t offload_bytes_(const Offload* o) { return (size_t)o->arrays * o->owned * sizeof(float); }

static inline void offload_open_streams_(Offload* o) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&o->in, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&o->out, cudaStreamNonBlocking));
    for (int s = 0; s < OFFLOAD_SLOTS_; s++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&o->filled[s], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&o->updated[s], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&o->emptied[s], cudaEventDisableTiming));
    }
}

// Arrays of `owned` zeros, on a disk in this directory, or in pinned memory if it is NULL.
static inline void offload_open(Offload* o, size_t owned, int has_master, const char* directory) {
    const char* what = "the optimizer's state";
    memset((void*)o, 0, sizeof(*o));
    o->owned = owned;
    o->arrays = offload_arrays_(has_master);
    if (directory) {
        o->disk = scratch_open(directory, offload_bytes_(o), what);
    }
    o->host =
        (float*)gpu_alloc_pinned(directory ? offload_places_bytes(has_master) : offload_bytes_(o), 1, what);
    o->slots = (float*)gpu_alloc(offload_planned_bytes(has_master), 1, "chunks of the optimizer's state");
    offload_open_streams_(o);
}

// Until what the last update wrote is on the host, or on the disk.
static inline void offload_wait(Offload* o) {
    CUDA_CHECK(cudaStreamSynchronize(o->out));
    for (int p = 0; o->disk && p < OFFLOAD_PLACES_; p++) {
        scratch_wait(o->disk, &o->work[p]);
    }
}

static inline void offload_close(Offload* o) {
    offload_wait(o);
    for (int s = 0; s < OFFLOAD_SLOTS_; s++) {
        CUDA_CHECK(cudaEventDestroy(o->emptied[s]));
        CUDA_CHECK(cudaEventDestroy(o->updated[s]));
        CUDA_CHECK(cudaEventDestroy(o->filled[s]));
    }
    CUDA_CHECK(cudaStreamDestroy(o->out));
    CUDA_CHECK(cudaStreamDestroy(o->in));
    gpu_free(o->slots);
    gpu_free_pinned(o->host);
    if (o->disk) {
        scratch_close(o->disk);
    }
}

// ---- an update ----

// Elements of chunk k.
static inline size_t offload_count_(const Offload* o, size_t k) {
    const size_t rest = o->owned - k * OFFLOAD_CHUNK;
    return rest < OFFLOAD_CHUNK ? rest : OFFLOAD_CHUNK;
}

// Array `a` of chunk k: on the GPU, and in pinned memory.
static inline float* offload_slot_(const Offload* o, size_t k, int a) {
    return o->slots + (k % OFFLOAD_SLOTS_ * (size_t)o->arrays + (size_t)a) * OFFLOAD_CHUNK;
}
static inline float* offload_place_(const Offload* o, size_t k, int a) {
    return o->disk ? o->host + (k % OFFLOAD_PLACES_ * (size_t)o->arrays + (size_t)a) * OFFLOAD_CHUNK
                   : o->host + (size_t)a * o->owned + k * OFFLOAD_CHUNK;
}

static inline void offload_copy_in_(const Offload* o, size_t k) {
    for (int a = 0; a < o->arrays; a++) {
        CUDA_CHECK(cudaMemcpyAsync(offload_slot_(o, k, a), offload_place_(o, k, a),
                                   offload_count_(o, k) * sizeof(float), cudaMemcpyHostToDevice, o->in));
    }
}
static inline void offload_copy_out_(const Offload* o, size_t k) {
    for (int a = 0; a < o->arrays; a++) {
        CUDA_CHECK(cudaMemcpyAsync(offload_place_(o, k, a), offload_slot_(o, k, a),
                                   offload_count_(o, k) * sizeof(float), cudaMemcpyDeviceToHost, o->out));
    }
}

// Queues the update of chunk k, which is in pinned memory.
template <class T>
static inline void offload_update_chunk_(Offload* o, AdamWUpdate<T> u, size_t k, const Gpu* gpu) {
    const size_t slot = k % OFFLOAD_SLOTS_;
    // What was in the slot: three chunks before, or in the last update.
    CUDA_CHECK(cudaStreamWaitEvent(o->in, o->emptied[slot], 0));
    offload_copy_in_(o, k);
    CUDA_CHECK(cudaEventRecord(o->filled[slot], o->in));
    CUDA_CHECK(cudaStreamWaitEvent(gpu->stream, o->filled[slot], 0));
    u.m = offload_slot_(o, k, 0);
    u.v = offload_slot_(o, k, 1);
    u.master = o->arrays == OFFLOAD_ARRAYS_ ? offload_slot_(o, k, 2) : NULL;
    adamw_update_part(u, k * OFFLOAD_CHUNK, offload_count_(o, k), gpu);
    CUDA_CHECK(cudaEventRecord(o->updated[slot], gpu->stream));
    CUDA_CHECK(cudaStreamWaitEvent(o->out, o->updated[slot], 0));
    offload_copy_out_(o, k);
    CUDA_CHECK(cudaEventRecord(o->emptied[slot], o->out));
}

// Where chunk k of array `a` lies on the disk.
static inline size_t offload_at_(const Offload* o, size_t k, int a) {
    return ((size_t)a * o->owned + k * OFFLOAD_CHUNK) * sizeof(float);
}

// Starts to read chunk k from the disk, when what was in its place has been written.
static inline void offload_start_read_(Offload* o, size_t k) {
    ScratchWork* work = &o->work[k % OFFLOAD_PLACES_];
    scratch_wait(o->disk, work);
    for (int a = 0; a < o->arrays; a++) {
        scratch_read(o->disk, offload_place_(o, k, a), offload_at_(o, k, a),
                     offload_count_(o, k) * sizeof(float), work);
    }
}

// Starts to write chunk k, when the GPU is done with it.
static inline void offload_start_write_(Offload* o, size_t k) {
    CUDA_CHECK(cudaEventSynchronize(o->emptied[k % OFFLOAD_SLOTS_]));
    for (int a = 0; a < o->arrays; a++) {
        scratch_write(o->disk, offload_place_(o, k, a), offload_at_(o, k, a),
                      offload_count_(o, k) * sizeof(float), &o->work[k % OFFLOAD_PLACES_]);
    }
}

// As adamw_update, with master, m and v on the host: those of `u` are not looked at. Queues all of it; with a disk it
// waits for most.
template <class T> static inline void offload_adamw_update(Offload* o, AdamWUpdate<T> u, const Gpu* gpu) {
    const size_t chunks = ceil_div(o->owned, OFFLOAD_CHUNK);
    for (size_t k = 0; !o->disk && k < chunks; k++) {
        offload_update_chunk_(o, u, k, gpu);
    }
    for (size_t k = 0; o->disk && k < chunks + 2;
         k++) { // reads chunk k, updates the one before, writes that before it
        if (k < chunks) {
            offload_start_read_(o, k);
        }
        if (1 <= k && k <= chunks) {
            scratch_wait(o->disk, &o->work[(k - 1) % OFFLOAD_PLACES_]);
            offload_update_chunk_(o, u, k - 1, gpu);
        }
        if (2 <= k) {
            offload_start_write_(o, k - 2);
        }
    }
}

// ---- between updates ----

// Bytes of m and v.
static inline size_t offload_state_bytes(const Offload* o) {
    return (OFFLOAD_ARRAYS_ - 1) * o->owned * sizeof(float);
}

// Copy `bytes` from byte `at` of the arrays on, and wait. From and to a disk the places are one buffer.
static inline void offload_read(Offload* o, void* to, size_t at, size_t bytes) {
    offload_wait(o);
    if (!o->disk) {
        memcpy(to, (const char*)o->host + at, bytes);
        return;
    }
    const size_t room = offload_places_bytes(o->arrays == OFFLOAD_ARRAYS_);
    for (size_t i = 0, count; i < bytes; i += count) {
        count = bytes - i < room ? bytes - i : room;
        scratch_read(o->disk, o->host, at + i, count, &o->work[0]);
        scratch_wait(o->disk, &o->work[0]);
        memcpy((char*)to + i, o->host, count);
    }
}
static inline void offload_write(Offload* o, const void* from, size_t at, size_t bytes) {
    offload_wait(o);
    if (!o->disk) {
        memcpy((char*)o->host + at, from, bytes);
        return;
    }
    const size_t room = offload_places_bytes(o->arrays == OFFLOAD_ARRAYS_);
    for (size_t i = 0, count; i < bytes; i += count) {
        count = bytes - i < room ? bytes - i : room;
        memcpy(o->host, (const char*)from + i, count);
        scratch_write(o->disk, o->host, at + i, count, &o->work[0]);
        scratch_wait(o->disk, &o->work[0]);
    }
}

// The master weights (owned) on the host: where they are, or, from a disk, in `room`.
static inline float* offload_master(Offload* o, float* room) {
    assert(o->arrays == OFFLOAD_ARRAYS_);
    if (!o->disk) {
        offload_wait(o);
        return o->host + offload_state_bytes(o) / sizeof(float);
    }
    offload_read(o, room, offload_state_bytes(o), o->owned * sizeof(float));
    return room;
}

// ---- the residual stream ----

enum { OFFLOAD_RESIDUALS = 2 }; // buffers on the GPU

typedef struct {
    int layers;                                  // that are moved; 0: nothing is offloaded
    size_t layer_bytes;                          // room for one
    char* host;                                  // (layers, layer_bytes) pinned
    cudaStream_t stream;                         // of all copies
    cudaEvent_t ready, moved[OFFLOAD_RESIDUALS]; // a buffer may be copied; the copy is done
} OffloadResiduals;

// Of L blocks, those whose part of the stream is moved.
static inline int offload_residual_layers(int L) { return L > OFFLOAD_RESIDUALS ? L - OFFLOAD_RESIDUALS : 0; }

// For L blocks; the stream after one takes `layer_bytes` at most.
static inline void offload_residuals_open(OffloadResiduals* r, int L, size_t layer_bytes) {
    memset((void*)r, 0, sizeof(*r));
    r->layers = offload_residual_layers(L);
    r->layer_bytes = layer_bytes;
    if (r->layers > 0) {
        r->host = (char*)gpu_alloc_pinned((size_t)r->layers, layer_bytes, "the residual stream");
        CUDA_CHECK(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreateWithFlags(&r->ready, cudaEventDisableTiming));
        for (int b = 0; b < OFFLOAD_RESIDUALS; b++) {
            CUDA_CHECK(cudaEventCreateWithFlags(&r->moved[b], cudaEventDisableTiming));
        }
    }
}

// After all work.
static inline void offload_residuals_close(OffloadResiduals* r) {
    if (r->layers > 0) {
        for (int b = 0; b < OFFLOAD_RESIDUALS; b++) {
            CUDA_CHECK(cudaEventDestroy(r->moved[b]));
        }
        CUDA_CHECK(cudaEventDestroy(r->ready));
        CUDA_CHECK(cudaStreamDestroy(r->stream));
        gpu_free_pinned(r->host);
    }
}

static inline int offload_residual_moves_(const OffloadResiduals* r, int l) {
    return 0 <= l && l < r->layers;
}

// Copies a buffer, after all that is queued so far on the main stream.
static inline void offload_residual_copy_(OffloadResiduals* r, int l, void* to, const void* from,
                                          size_t bytes, const Gpu* gpu) {
    assert(bytes <= r->layer_bytes);
    CUDA_CHECK(cudaEventRecord(r->ready, gpu->stream));
    CUDA_CHECK(cudaStreamWaitEvent(r->stream, r->ready, 0));
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, r->stream));
    CUDA_CHECK(cudaEventRecord(r->moved[l % OFFLOAD_RESIDUALS], r->stream));
}

// After block l has computed `residual`, its part of the stream: starts to copy it out.
static inline void offload_residual_out(OffloadResiduals* r, int l, const void* residual, size_t bytes,
                                        const Gpu* gpu) {
    if (offload_residual_moves_(r, l)) {
        offload_residual_copy_(r, l, r->host + (size_t)l * r->layer_bytes, residual, bytes, gpu);
    }
}

// When its buffer is not used any more: starts to copy that part of the stream back.
static inline void offload_residual_in(OffloadResiduals* r, int l, void* residual, size_t bytes,
                                       const Gpu* gpu) {
    if (offload_residual_moves_(r, l)) {
        offload_residual_copy_(r, l, residual, r->host + (size_t)l * r->layer_bytes, bytes, gpu);
    }
}

// Before its buffer is used again after offload_residual_out, or its contents after offload_residual_in.
static inline void offload_residual_wait(const OffloadResiduals* r, int l, const Gpu* gpu) {
    if (offload_residual_moves_(r, l)) {
        CUDA_CHECK(cudaStreamWaitEvent(gpu->stream, r->moved[l % OFFLOAD_RESIDUALS], 0));
    }
}

#endif
