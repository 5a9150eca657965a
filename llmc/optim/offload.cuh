/*
offload.cuh -- keeps the optimizer's state and the residual stream on the host between their uses.

The slots of the optimizer's state (optimizer.h), master weights among them, are in pinned memory or
in a file. They pass through the GPU in chunks of OFFLOAD_CHUNK owned elements; a group whose update
needs whole tensors is one chunk. Frozen parameters have their own chunks, which no update moves. A
chunk is an interval of every slot. The array of a slot is the same as on a GPU, but each chunk
begins at a multiple of SCRATCH_UNIT bytes.

Three streams copy a chunk in, update it and copy it out. They wait for each other by events, so the
bus works in both directions while the GPU computes. The kernel and its elements are the same as
without offloading, and so are the bits. An update of AdamW moves 12 bytes a parameter in and 12 out
(8 without master weights).

On a disk the arrays are a file of scratch_file.h. A chunk then also has a place in pinned memory:
threads read the next chunk and write the last ones while one is on the GPU. Chunk k always has the
same place, so to wait for the place is to wait for that part of the file.

If a block keeps only the residual stream (RECOMPUTE_BLOCK), that can be in pinned memory, too. The
blocks use two buffers in turn. The output of block l goes out beside block l + 1, and comes back
beside the backward pass of block l + 2; block l + 1 needs it. The last two stay. In a micro-step
the main stream waits for every copy, so it can be one CUDA graph.
*/
#ifndef LLMC_OFFLOAD_CUH
#define LLMC_OFFLOAD_CUH

#include <assert.h>
#include <string.h>

#include "llmc/base/scratch_file.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/optimizer.cuh"

#ifndef OFFLOAD_CHUNK
#define OFFLOAD_CHUNK ((size_t)4 << 20) // elements; a multiple of TENSOR_SHARD_UNIT
#endif
// Chunks on the GPU at a time, and places of chunks between it and a disk.
enum { OFFLOAD_SLOTS_ = 3, OFFLOAD_PLACES_ = 4 };

// Begin of a chunk of a slot: in elements of the array as on a GPU, and in bytes on the host or the
// disk.
typedef struct {
    size_t position, at;
} OffloadChunk_;

typedef struct {
    const OptimizerState* state;
    // All chunks; the first ones, which updates move. The others are master weights of frozen
    // parts.
    size_t chunks, updated;
    size_t* first;        // (chunks + 1) owned elements before a chunk
    OffloadChunk_* chunk; // (chunks + 1, STATE_SLOTS); the last ones are ends
    size_t bytes;         // size of all slots on the host or the disk
    // begin of each slot in the memory of one chunk; the last entry is the end
    size_t room[STATE_SLOTS + 1];
} OffloadLayout;

typedef struct {
    OffloadLayout layout;
    char* pinned;  // memory that `host` lies in
    char* host;    // all slots; with a disk OFFLOAD_PLACES_ chunks, at a multiple of SCRATCH_UNIT
    Scratch* disk; // all slots; NULL: no disk
    ScratchWork work[OFFLOAD_PLACES_];
    char* slots;          // OFFLOAD_SLOTS_ chunks on the GPU; NULL: nothing is offloaded
    cudaStream_t in, out; // copies from and to the host
    cudaEvent_t filled[OFFLOAD_SLOTS_], updated[OFFLOAD_SLOTS_], emptied[OFFLOAD_SLOTS_];
} Offload;

// ---- memory ----

static inline size_t offload_round_up_(size_t bytes) {
    return ceil_div(bytes, (size_t)SCRATCH_UNIT) * SCRATCH_UNIT;
}

static inline const OffloadChunk_* offload_chunk_(const OffloadLayout* l, size_t k, int slot) {
    return &l->chunk[k * STATE_SLOTS + (size_t)slot];
}

// Returns the bytes of a chunk of a slot.
static inline size_t offload_bytes_(const OffloadLayout* l, size_t k, int slot) {
    return (offload_chunk_(l, k + 1, slot)->position - offload_chunk_(l, k, slot)->position) *
           l->state->slots[slot].element_bytes;
}

// Returns the begin of the matrices of group g in a slot; MAP_NONE: they have none.
static inline size_t offload_matrices_begin_(const OptimizerState* s, int slot, int g) {
    for (int k = 0; k < s->num_matrices; k++) {
        const TensorRow* row = &s->rows[s->matrices[k].row];
        if (tensor_is_in_group(row, g) && state_matrix_elements(s, slot, &s->matrices[k]) > 0) {
            const OwnedMatrix first = {&s->matrices[k], tensor_first_copy_in_group(row, g), 0};
            return state_matrix_begin(s, slot, first);
        }
    }
    return MAP_NONE;
}

// Returns the begin of what a slot has of owned elements first ... end - 1; MAP_NONE: nothing.
static inline size_t offload_begin_(const OptimizerState* s, int slot, size_t first, size_t end) {
    const Map* map = s->map;
    size_t begin = slot >= STATE_MASTER ? first : MAP_NONE;
    for (int g = 0; g < model_groups(s->cfg) && begin == MAP_NONE; g++) {
        const MapSpan own = update_owned(map, g);
        MapRange range = {};
        if (own.begin >= end || own.begin + own.count <= first) {
            continue;
        }
        begin = offload_matrices_begin_(s, slot, g);
        while (begin == MAP_NONE && map_next_range(map, map_trained(map, g), MAP_OWNED, &range)) {
            const size_t at = map_range_at(map, &range, MAP_OWNED), skips = first > at ? first - at : 0;
            if (range.shard->slot[slot] != MAP_NONE && at < end && skips < range.count) {
                const MapRange part = map_part_of_range(range, range.before + skips, range.count);
                begin = state_range_begin(s, slot, &part);
            }
        }
    }
    return begin;
}

// Places the chunks of a slot from byte l->bytes on, and after the slots before it in the memory of
// one chunk. Padding before the first range of a chunk belongs to the chunk before it.
static inline void offload_place_slot_(OffloadLayout* l, int slot) {
    const StateSlot* s = &l->state->slots[slot];
    size_t largest = 0, next = s->bytes / s->element_bytes;
    for (size_t k = l->chunks + 1; k-- > 0;) {
        const size_t begin = k < l->chunks && s->bytes > 0
                                 ? offload_begin_(l->state, slot, l->first[k], l->first[k + 1])
                                 : MAP_NONE;
        next = begin != MAP_NONE ? begin : next;
        l->chunk[k * STATE_SLOTS + (size_t)slot].position = next;
    }
    for (size_t k = 0; k <= l->chunks; k++) {
        if (k > 0) {
            const size_t bytes = offload_round_up_(offload_bytes_(l, k - 1, slot));
            largest = k <= l->updated && bytes > largest ? bytes : largest;
            l->bytes += bytes;
        }
        l->chunk[k * STATE_SLOTS + (size_t)slot].at = l->bytes;
    }
    l->room[slot + 1] = l->room[slot] + largest;
}

// Returns the end of the chunk that begins at element `first`. It is not after element `end`, and
// not inside a group whose update needs whole tensors.
static inline size_t offload_chunk_end_(const OptimizerState* state, size_t first, size_t end) {
    end = first + OFFLOAD_CHUNK < end ? first + OFFLOAD_CHUNK : end;
    for (int g = model_groups(state->cfg) - 1; g >= 0; g--) {
        const MapSpan own = update_owned(state->map, g);
        if (state_needs_tensors(state, g) && first < own.begin + own.count && own.begin < end) {
            end = first < own.begin ? own.begin : own.begin + own.count;
        }
    }
    return end;
}

// Sets the begins of the chunks.
static inline void offload_cut_(OffloadLayout* l, const OptimizerState* state) {
    const size_t owned = state->map->totals.elements[MAP_OWNED], updated = state->map->totals.updated,
                 most = ceil_div(owned, OFFLOAD_CHUNK) + 2 * (size_t)model_groups(state->cfg) + 1;
    l->first = (size_t*)check_alloc(most + 1, sizeof(size_t), "chunks of the optimizer's state");
    while (l->first[l->chunks] < owned) {
        const size_t first = l->first[l->chunks++];
        l->first[l->chunks] = offload_chunk_end_(state, first, first < updated ? updated : owned);
        l->updated += first < updated;
    }
    assert(l->chunks <= most);
}

// Places the chunks of a state, which stays with the caller.
static inline void offload_place_(OffloadLayout* l, const OptimizerState* state) {
    l->state = state;
    offload_cut_(l, state);
    l->chunk = (OffloadChunk_*)check_alloc((l->chunks + 1) * STATE_SLOTS, sizeof(OffloadChunk_),
                                           "chunks of the optimizer's state");
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        offload_place_slot_(l, slot);
    }
}

// Does so; in a dry run by a map of its own, since that of the state has no ranges.
static inline void offload_layout_open(OffloadLayout* l, const OptimizerState* state) {
    memset(l, 0, sizeof(*l));
    if (state->map->shards) {
        offload_place_(l, state);
        return;
    }
    Memory memory = memory_on_host();
    Map map;
    OptimizerState placed = *state;
    map_open(&map, &memory, MEMORY_HOST, &state->map->of, state->map->rank);
    placed.map = &map;
    offload_place_(l, &placed);
    l->state = state;
    memory_close(&memory);
}

static inline void offload_layout_close(OffloadLayout* l) {
    free(l->chunk);
    free(l->first);
}

static inline void offload_open_streams_(Offload* o) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&o->in, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&o->out, cudaStreamNonBlocking));
    for (int s = 0; s < OFFLOAD_SLOTS_; s++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&o->filled[s], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&o->updated[s], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&o->emptied[s], cudaEventDisableTiming));
    }
}

// Counts the state where it is kept. An update moves it to the GPU and back, except the master
// weights of frozen parts.
static inline void offload_count_(const OffloadLayout* l, Memory* memory, MemoryPlace place) {
    size_t gaps = l->bytes;
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const StateSlot* s = &l->state->slots[slot];
        const double moves = s->bytes > 0 ? state_moved_bytes(s) / (double)s->bytes : 0;
        memory_set_moves(memory_count(memory, s->label, place, s->bytes), moves, moves);
        gaps -= s->bytes;
    }
    memory_count(memory, "gaps between chunks", place, gaps);
}

// Opens the slots of a state, filled with zeros: on a disk in this directory, or in pinned memory
// if it is NULL. Ends the program if the state has none. Between the GPU and a disk they pass
// through pinned memory, which needs room for alignment (CUDA promises a multiple of 256 bytes).
static inline void offload_open(Offload* o, Memory* memory, const OptimizerState* state,
                                const char* directory) {
    const char* what = "the optimizer's state";
    CHECK(state->bytes > 0, "--offload-optimizer: --optimizer %s has no state here; wanted off",
          optimizer_word(state->optimizer.name));
    memset((void*)o, 0, sizeof(*o));
    offload_layout_open(&o->layout, state);
    const size_t room = o->layout.room[STATE_SLOTS];
    offload_count_(&o->layout, memory, directory ? MEMORY_DISK : MEMORY_HOST);
    if (directory) {
        o->pinned = (char*)memory_take(memory, "pinned chunks of state", MEMORY_PINNED,
                                       SCRATCH_UNIT + OFFLOAD_PLACES_ * room);
    } else {
        o->pinned = (char*)memory_allocate(memory, what, MEMORY_PINNED, o->layout.bytes);
    }
    o->slots = (char*)memory_take(memory, "chunks of state", MEMORY_DEVICE, OFFLOAD_SLOTS_ * room);
    if (memory_is_dry(memory)) {
        offload_layout_close(&o->layout);
        return;
    }
    o->host = directory ? (char*)offload_round_up_((uintptr_t)o->pinned) : o->pinned;
    if (directory) {
        o->disk = scratch_open(directory, o->layout.bytes, what, o->host);
        if (!scratch_is_direct(o->disk)) {
            printf("note: %s takes no direct I/O: the optimizer's state passes through the page cache\n",
                   directory);
        }
    }
    offload_open_streams_(o);
}

// Waits until the results of the last update are on the host, or on the disk.
static inline void offload_wait(Offload* o) {
    CUDA_CHECK(cudaStreamSynchronize(o->out));
    for (int p = 0; o->disk && p < OFFLOAD_PLACES_; p++) {
        scratch_wait(o->disk, &o->work[p]);
    }
}

// Closes it, if it was opened.
static inline void offload_close(Offload* o) {
    if (!o->slots) {
        return;
    }
    offload_wait(o);
    for (int s = 0; s < OFFLOAD_SLOTS_; s++) {
        CUDA_CHECK(cudaEventDestroy(o->emptied[s]));
        CUDA_CHECK(cudaEventDestroy(o->updated[s]));
        CUDA_CHECK(cudaEventDestroy(o->filled[s]));
    }
    CUDA_CHECK(cudaStreamDestroy(o->out));
    CUDA_CHECK(cudaStreamDestroy(o->in));
    if (o->disk) {
        scratch_close(o->disk);
    }
    offload_layout_close(&o->layout);
}

// ---- an update ----

// Return a slot of chunk k on the GPU, and in pinned memory.
static inline char* offload_slot_(const Offload* o, size_t k, int slot) {
    return o->slots + k % OFFLOAD_SLOTS_ * o->layout.room[STATE_SLOTS] + o->layout.room[slot];
}
static inline char* offload_place_(const Offload* o, size_t k, int slot) {
    return o->disk ? o->host + k % OFFLOAD_PLACES_ * o->layout.room[STATE_SLOTS] + o->layout.room[slot]
                   : o->host + offload_chunk_(&o->layout, k, slot)->at;
}

// Copies the slots in `used`.
static inline void offload_copy_(const Offload* o, size_t k, unsigned used, cudaMemcpyKind kind) {
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const size_t bytes = used >> slot & 1 ? offload_bytes_(&o->layout, k, slot) : 0;
        char *on_gpu = offload_slot_(o, k, slot), *on_host = offload_place_(o, k, slot);
        if (bytes > 0 && kind == cudaMemcpyHostToDevice) {
            CUDA_CHECK(cudaMemcpyAsync(on_gpu, on_host, bytes, kind, o->in));
        } else if (bytes > 0) {
            CUDA_CHECK(cudaMemcpyAsync(on_host, on_gpu, bytes, kind, o->out));
        }
    }
}

// Returns the pointer to a whole array on the GPU, of which only chunk k exists; NULL if nothing
// has the slot.
static inline void* offload_array_(const Offload* o, size_t k, int slot) {
    const StateSlot* s = &o->layout.state->slots[slot];
    const uintptr_t before = (uintptr_t)(offload_chunk_(&o->layout, k, slot)->position * s->element_bytes);
    return s->bytes ? (void*)((uintptr_t)offload_slot_(o, k, slot) - before) : NULL;
}

// Queues the update of chunk k, which is in pinned memory.
template <class T>
static inline void offload_update_chunk_(Offload* o, OptimizerUpdate<T> u, size_t k, const Gpu* gpu) {
    const size_t buffer = k % OFFLOAD_SLOTS_, first = o->layout.first[k];
    // the buffer's last content: three chunks before, or in the last update
    CUDA_CHECK(cudaStreamWaitEvent(o->in, o->emptied[buffer], 0));
    offload_copy_(o, k, optimizer_uses(u), cudaMemcpyHostToDevice);
    CUDA_CHECK(cudaEventRecord(o->filled[buffer], o->in));
    CUDA_CHECK(cudaStreamWaitEvent(gpu->stream, o->filled[buffer], 0));
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        u.slots[slot] = offload_array_(o, k, slot);
    }
    optimizer_update_part(u, first, o->layout.first[k + 1] - first, gpu);
    CUDA_CHECK(cudaEventRecord(o->updated[buffer], gpu->stream));
    CUDA_CHECK(cudaStreamWaitEvent(o->out, o->updated[buffer], 0));
    offload_copy_(o, k, optimizer_uses(u), cudaMemcpyDeviceToHost);
    CUDA_CHECK(cudaEventRecord(o->emptied[buffer], o->out));
}

// Starts to read chunk k from the disk, once the last content of its place is written.
static inline void offload_start_read_(Offload* o, size_t k, unsigned used) {
    ScratchWork* work = &o->work[k % OFFLOAD_PLACES_];
    scratch_wait(o->disk, work);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const size_t bytes = offload_round_up_(offload_bytes_(&o->layout, k, slot));
        if (bytes > 0 && used >> slot & 1) {
            scratch_read(o->disk, offload_place_(o, k, slot), offload_chunk_(&o->layout, k, slot)->at, bytes,
                         work);
        }
    }
}

// Starts to write chunk k, once the GPU is done with it.
static inline void offload_start_write_(Offload* o, size_t k, unsigned used) {
    ScratchWork* work = &o->work[k % OFFLOAD_PLACES_];
    CUDA_CHECK(cudaEventSynchronize(o->emptied[k % OFFLOAD_SLOTS_]));
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const size_t bytes = offload_round_up_(offload_bytes_(&o->layout, k, slot));
        if (bytes > 0 && used >> slot & 1) {
            scratch_write(o->disk, offload_place_(o, k, slot), offload_chunk_(&o->layout, k, slot)->at, bytes,
                          work);
        }
    }
}

// Does what optimizer_update does, with the slots on the host; those of `u` are not read. Queues
// all work; with a disk it waits for most of it.
template <class T>
static inline void offload_update(Offload* o, const OptimizerUpdate<T>& u, const Gpu* gpu) {
    const size_t chunks = o->layout.updated;
    for (size_t k = 0; !o->disk && k < chunks; k++) {
        offload_update_chunk_(o, u, k, gpu);
    }
    for (size_t k = 0; o->disk && k < chunks + 2;
         k++) { // reads chunk k, updates the one before, writes that before it
        if (k < chunks) {
            offload_start_read_(o, k, optimizer_uses(u));
        }
        if (1 <= k && k <= chunks) {
            scratch_wait(o->disk, &o->work[(k - 1) % OFFLOAD_PLACES_]);
            offload_update_chunk_(o, u, k - 1, gpu);
        }
        if (2 <= k) {
            offload_start_write_(o, k - 2, optimizer_uses(u));
        }
    }
}

// ---- between updates ----

typedef enum { OFFLOAD_READ_, OFFLOAD_WRITE_ } OffloadMove_;

// Copies bytes at ... at + bytes - 1 of the file through the places, as one buffer: whole units of
// the disk.
static inline void offload_move_on_disk_(Offload* o, char* memory, size_t at, size_t bytes,
                                         OffloadMove_ move) {
    const size_t room = OFFLOAD_PLACES_ * o->layout.room[STATE_SLOTS];
    for (size_t i = 0, count; i < bytes; i += count) {
        const size_t begin = (at + i) / SCRATCH_UNIT * SCRATCH_UNIT, left = bytes - i,
                     in_room = begin + room - (at + i);
        count = left < in_room ? left : in_room;
        const size_t units = offload_round_up_(at + i + count) - begin;
        scratch_read(o->disk, o->host, begin, units, &o->work[0]);
        scratch_wait(o->disk, &o->work[0]);
        if (move == OFFLOAD_READ_) {
            memcpy(memory + i, o->host + (at + i - begin), count);
            continue;
        }
        memcpy(o->host + (at + i - begin), memory + i, count);
        scratch_write(o->disk, o->host, begin, units, &o->work[0]);
        scratch_wait(o->disk, &o->work[0]);
    }
}

// Copies bytes at ... at + bytes - 1 of the array of a slot, chunk by chunk.
static inline void offload_move_(Offload* o, char* memory, int slot, size_t at, size_t bytes,
                                 OffloadMove_ move) {
    const size_t element = o->layout.state->slots[slot].element_bytes, end = at + bytes;
    offload_wait(o);
    for (size_t k = 0; k < o->layout.chunks; k++) {
        const OffloadChunk_* chunk = offload_chunk_(&o->layout, k, slot);
        const size_t begin = chunk->position * element,
                     chunk_end = begin + offload_bytes_(&o->layout, k, slot);
        const size_t from = at > begin ? at : begin, to = end < chunk_end ? end : chunk_end;
        if (from >= to) {
            continue;
        }
        char* here = memory + (from - at);
        const size_t there = chunk->at + (from - begin);
        if (o->disk) {
            offload_move_on_disk_(o, here, there, to - from, move);
        } else if (move == OFFLOAD_READ_) {
            memcpy(here, o->host + there, to - from);
        } else {
            memcpy(o->host + there, here, to - from);
        }
    }
}

// Copy bytes at ... at + bytes - 1 of the array of a slot, and wait.
static inline void offload_read(Offload* o, void* to, int slot, size_t at, size_t bytes) {
    offload_move_(o, (char*)to, slot, at, bytes, OFFLOAD_READ_);
}
static inline void offload_write(Offload* o, const void* from, int slot, size_t at, size_t bytes) {
    offload_move_(o, (char*)from, slot, at, bytes, OFFLOAD_WRITE_);
}

// ---- the residual stream ----

enum { OFFLOAD_RESIDUALS = 2 }; // buffers on the GPU

typedef struct {
    // blocks whose output is moved; 0: nothing is offloaded
    int layers;
    size_t layer_bytes;                          // room for one output
    char* host;                                  // (layers, layer_bytes) pinned
    cudaStream_t stream;                         // stream of all copies
    cudaEvent_t ready, moved[OFFLOAD_RESIDUALS]; // a buffer may be copied; the copy is done
} OffloadResiduals;

// Returns how many of L blocks have their output moved.
static inline int offload_residual_layers(int L) { return L > OFFLOAD_RESIDUALS ? L - OFFLOAD_RESIDUALS : 0; }

// Opens the memory for L blocks with outputs of up to `layer_bytes`. Each of the `micro_steps` of
// an update moves it out and in.
static inline void offload_residuals_open(OffloadResiduals* r, Memory* memory, int L, size_t layer_bytes,
                                          double micro_steps) {
    memset((void*)r, 0, sizeof(*r));
    r->layers = offload_residual_layers(L);
    r->layer_bytes = layer_bytes;
    const size_t bytes = (size_t)r->layers * layer_bytes;
    memory_set_moves(memory_count(memory, "residual stream", MEMORY_PINNED, bytes), micro_steps, micro_steps);
    r->host = (char*)memory_allocate(memory, "the residual stream", MEMORY_PINNED, bytes);
    if (r->layers > 0 && !memory_is_dry(memory)) {
        CUDA_CHECK(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreateWithFlags(&r->ready, cudaEventDisableTiming));
        for (int b = 0; b < OFFLOAD_RESIDUALS; b++) {
            CUDA_CHECK(cudaEventCreateWithFlags(&r->moved[b], cudaEventDisableTiming));
        }
    }
}

// Closes it, once all work is done.
static inline void offload_residuals_close(OffloadResiduals* r) {
    if (r->layers > 0) {
        for (int b = 0; b < OFFLOAD_RESIDUALS; b++) {
            CUDA_CHECK(cudaEventDestroy(r->moved[b]));
        }
        CUDA_CHECK(cudaEventDestroy(r->ready));
        CUDA_CHECK(cudaStreamDestroy(r->stream));
    }
}

static inline int offload_residual_moves_(const OffloadResiduals* r, int l) {
    return 0 <= l && l < r->layers;
}

// Copies a buffer, after all work queued so far on the main stream.
static inline void offload_residual_copy_(OffloadResiduals* r, int l, void* to, const void* from,
                                          size_t bytes, const Gpu* gpu) {
    assert(bytes <= r->layer_bytes);
    CUDA_CHECK(cudaEventRecord(r->ready, gpu->stream));
    CUDA_CHECK(cudaStreamWaitEvent(r->stream, r->ready, 0));
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, r->stream));
    CUDA_CHECK(cudaEventRecord(r->moved[l % OFFLOAD_RESIDUALS], r->stream));
}

// Starts to copy `residual`, the output of block l, to the host. Call it after block l.
static inline void offload_residual_out(OffloadResiduals* r, int l, const void* residual, size_t bytes,
                                        const Gpu* gpu) {
    if (offload_residual_moves_(r, l)) {
        offload_residual_copy_(r, l, r->host + (size_t)l * r->layer_bytes, residual, bytes, gpu);
    }
}

// Starts to copy the output of block l back. Call it when nothing uses its buffer any more.
static inline void offload_residual_in(OffloadResiduals* r, int l, void* residual, size_t bytes,
                                       const Gpu* gpu) {
    if (offload_residual_moves_(r, l)) {
        offload_residual_copy_(r, l, residual, r->host + (size_t)l * r->layer_bytes, bytes, gpu);
    }
}

// Waits for a copy: after offload_residual_out before the buffer is used again, after
// offload_residual_in before its content is.
static inline void offload_residual_wait(const OffloadResiduals* r, int l, const Gpu* gpu) {
    if (offload_residual_moves_(r, l)) {
        CUDA_CHECK(cudaStreamWaitEvent(gpu->stream, r->moved[l % OFFLOAD_RESIDUALS], 0));
    }
}

#endif
