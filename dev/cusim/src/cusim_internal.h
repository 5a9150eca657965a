/*
cusim_internal.h -- what the parts of the CPU device share.

    cusim_config.cpp   environment, random numbers, cusim_die
    cusim_fiber.cpp    stacks, the switch between them, the deadlock report
    cusim_kernel.cpp   launches: blocks, their threads, their shared memory
    cusim_barrier.cpp  barriers of blocks, grids and warps
    cusim_async.cpp    copies that complete later: cp.async, cp.async.bulk, TMA, mbarrier; proxies
    cusim_wgmma.cpp    matmuls of a warpgroup; setmaxnreg
    cusim_memory.cpp   allocations, checks of pointers and ranges, copies
    cusim_stream.cpp   streams and events, work in order
    cusim_graph.cpp    stream capture and graphs
    cusim_device.cpp   properties, limits, errors
    cusim_trace.cpp    all operations, as lines of JSON
    cusim_lt.cpp       cublasLt        cusim_nccl.cpp     NCCL

Each thread of a block runs on its own stack (a fiber) of the one host thread. It runs until a
barrier or another primitive must wait, and then switches to the next thread. So we can choose the
order of threads (CUSIM_ORDER), and a program that depends on it is detected.

The runtime is compiled without the sanitizers (except MemorySanitizer, which must see every store)
and tells them about its actions through their public functions, which are weak symbols here: NULL
means "not that sanitizer".

Three traps:
  - Under ThreadSanitizer every device thread is a TSan fiber. malloc is instrumented, so memory
    that the runtime itself allocates or frees while a device thread runs would look shared between
    device threads: the runtime does so inside a HostScope.
  - Under MemorySanitizer libstdc++'s compiled parts (std::map, iostream, locale) are not
    instrumented and give false reports. Only header-only parts are used: vector, deque, function.
  - Objects that outlive main are allocated and never freed, so that no destructor runs before the
    last use.
*/
#ifndef CUSIM_INTERNAL_H
#define CUSIM_INTERNAL_H

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "../include/cusim_runtime.h"
#include "cusim_tensor.h"

#define CUSIM_WEAK __attribute__((weak))
// on the path of every switch
#define CUSIM_ALWAYS_INLINE static inline __attribute__((always_inline))

extern "C" {
CUSIM_WEAK void __asan_init(void);
CUSIM_WEAK void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t bytes);
CUSIM_WEAK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* bytes);
CUSIM_WEAK void __sanitizer_print_stack_trace(void);
CUSIM_WEAK void __tsan_init(void);
CUSIM_WEAK void* __tsan_get_current_fiber(void);
CUSIM_WEAK void* __tsan_create_fiber(unsigned flags);
CUSIM_WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
CUSIM_WEAK void __tsan_acquire(void*);
CUSIM_WEAK void __tsan_release(void*);
CUSIM_WEAK void __tsan_write_range(void*, unsigned long bytes);
CUSIM_WEAK void __tsan_read_range(void*, unsigned long bytes);
CUSIM_WEAK void AnnotateIgnoreReadsBegin(const char* file, int line);
CUSIM_WEAK void AnnotateIgnoreReadsEnd(const char* file, int line);
CUSIM_WEAK void AnnotateIgnoreWritesBegin(const char* file, int line);
CUSIM_WEAK void AnnotateIgnoreWritesEnd(const char* file, int line);
CUSIM_WEAK void __msan_init(void);
CUSIM_WEAK void __msan_poison(const volatile void*, size_t bytes);
CUSIM_WEAK void __msan_unpoison(const volatile void*, size_t bytes);
CUSIM_WEAK void __msan_check_mem_is_initialized(const volatile void*, size_t bytes);
}

static inline bool sanitized() { return __asan_init || __tsan_init || __msan_init; }
static inline void tsan_acquire(void* at) {
    if (__tsan_acquire) {
        __tsan_acquire(at);
    }
}
static inline void tsan_release(void* at) {
    if (__tsan_release) {
        __tsan_release(at);
    }
}

// ---- cusim_config.cpp ----

// greedy: a warp as far as it goes
typedef enum { ORDER_UP, ORDER_DOWN, ORDER_RANDOM, ORDER_GREEDY } Order;
typedef enum { STREAMS_EAGER, STREAMS_LAZY, STREAMS_RANDOM } StreamOrder;

typedef struct {
    Order order;
    StreamOrder streams;
    uint64_t seed;
    int wave;            // blocks that run at the same time
    bool protect, stats; // host access to device memory faults; numbers at exit
    // streams do nothing, and device memory is only addresses; the host reads zeros
    bool dry;
} Config;
extern const Config config;

uint32_t random_below(uint32_t n); // the same sequence in every run with the same seed
static inline bool order_is_random() { return config.order == ORDER_RANDOM || config.order == ORDER_GREEDY; }
double now_s();
const char* kernel_name(const void* kernel);
unsigned long environment_number(const char* name, unsigned long otherwise, unsigned long min,
                                 unsigned long max);

// ---- the trace (cusim_trace.cpp) ----

void trace_line(const char* format, ...) __attribute__((format(printf, 1, 2)));
void trace_kernel(const void* kernel, dim3 grid, dim3 block, size_t dynamic_bytes);

// ---- device threads (cusim_fiber.cpp, cusim_kernel.cpp) ----

struct Block;
struct DeviceThread;

struct Fiber {
    void* stack_pointer; // valid while it does not run
    char* stack;
    size_t stack_bytes;
    void* asan_fake_stack;
};

// Meeting of the lanes of one mask. Results are doubled: a fast lane may be at its next exchange
// while a slow one still reads the current one.
struct Rendezvous {
    unsigned mask, arrived;
    int op, line, parity;
    const char* file;
    char sync[2][8]; // an address for ThreadSanitizer, likewise doubled
    DeviceThread* waiting[32];
    alignas(16) unsigned char values[2][512];
};

struct Warp {
    unsigned present, exited; // lanes
    Rendezvous meeting[8];    // masks in flight at the same time
};

struct Barrier {
    unsigned arrived, expected;
    int parity, line, accumulator, result[2];
    const char* file;
    char sync[2][8];
    std::vector<DeviceThread*> waiting;
};

struct AsyncCopy {
    char* to;
    const char* from;
    int bytes, source_bytes, group;
};
// cp.async.bulk or, with a map, TMA: a box of a tensor.
struct BulkCopy {
    char* to;
    const char* from; // NULL with a map
    unsigned bytes;
    uint64_t* barrier;
    TensorMap map;
    int at[TENSOR_RANK_MAX]; // corner of the box
};

typedef enum { THREAD_NEW, THREAD_RUNNING, THREAD_BLOCKED, THREAD_READY, THREAD_DONE } ThreadState;

struct DeviceThread {
    uint3 index;
    unsigned lane;
    Warp* warp;
    Block* block;
    Fiber* fiber;     // fiber that it runs on
    Fiber* own_fiber; // under ThreadSanitizer, its own fiber forever; else NULL
    void* tsan_fiber;
    ThreadState state;
    const char *why, *file; // reason for waiting, for the deadlock report
    int line;
    int copy_group; // the group being filled
    std::vector<AsyncCopy> copies;
    // marks (Block) that no fence_async of this thread has followed, and those that one has
    std::vector<unsigned> stored, fenced;
};

struct SharedArray {
    void* identity; // identity of its declaration
    char* data;
    size_t bytes;
};

struct WgmmaState;
struct BarrierInMemory { // an mbarrier
    uint64_t* address;
    bool is_published; // to TMA
};

struct Block {
    uint3 index;
    unsigned threads;
    Barrier barriers[16]; // 0 is __syncthreads
    char fence[8];        // an address for ThreadSanitizer
    std::vector<Warp> warps;
    char* dynamic_shared;
    size_t dynamic_bytes;
    std::vector<SharedArray> arrays;
    std::vector<BulkCopy> bulk_copies;
    std::vector<BarrierInMemory> mbarriers;
    // One for each 16 bytes of dynamic memory that a thread stored for TMA or wgmma, until a
    // fence_async and a barrier of that thread: the number of the thread plus 1.
    std::vector<unsigned> marks;
    unsigned marked;
    WgmmaState* wgmma;                 // NULL before the first one
    unsigned registers, registers_set; // by setmaxnreg, and the threads that called it
};

// Queue of threads: first in, first out, or taken from the middle. Never allocates while device
// threads run.
struct ReadyQueue {
    std::vector<DeviceThread*> slots; // its size is a power of two
    unsigned head, tail;

    void reset(unsigned threads) {
        unsigned capacity = 1;
        while (capacity < threads + 1) {
            capacity *= 2;
        }
        if (slots.size() < capacity) {
            slots.resize(capacity);
        }
        head = tail = 0;
    }
    bool empty() const { return head == tail; }
    unsigned size() const { return tail - head; }
    DeviceThread*& at(unsigned i) { return slots[(head + i) & (slots.size() - 1)]; }
    void push(DeviceThread* thread) { slots[tail++ & (slots.size() - 1)] = thread; }
    void push_front(DeviceThread* thread) { slots[--head & (slots.size() - 1)] = thread; }
    DeviceThread* take(unsigned i) {
        std::swap(at(0), at(i));
        return slots[head++ & (slots.size() - 1)];
    }
};

// The running kernel, and memory that the next one reuses.
struct Engine {
    const void* kernel;
    const std::function<void()>* body; // NULL while no kernel runs
    bool cooperative;

    std::vector<Block> blocks;         // of this wave
    // of this wave; entries beyond `count` are left over from larger waves
    std::vector<DeviceThread> threads;
    std::vector<unsigned> order;       // order in which threads are started
    unsigned count, started, alive;
    unsigned long spins; // yields since the last progress
    DeviceThread* current;
    Warp* last_warp;
    ReadyQueue ready;
    Barrier grid;

    Fiber host;
    std::vector<Fiber*> idle_fibers;
    unsigned fibers;

    // ThreadSanitizer: all threads start after kernel_start and end before kernel_end; nothing
    // orders two blocks.
    char kernel_start[8], kernel_end[8];
    void *tsan_host, *tsan_copy_engine;
    std::vector<void*> tsan_fibers;
    std::vector<Fiber*> tsan_stacks;
    unsigned tsan_rotation;

    std::vector<SharedArray> array_cache; // without sanitizers, the next block reuses shared memory
    char* dynamic_cache;
    size_t dynamic_cache_bytes;
    std::vector<char*> garbage; // shared memory to free when no block can access it any more
    size_t garbage_bytes;

    unsigned long total_launches, total_blocks, total_threads, total_switches;
};
extern Engine& engine;
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

Fiber* fiber_new();
void fiber_learn_host_stack();
void die_of_deadlock() __attribute__((noreturn));
extern "C" void cusim_swap_stacks(void** save, void* load);

// Scope in which the runtime's own memory is managed as the host, or as the copy engine, for
// ThreadSanitizer.
struct HostScope {
    void* device_thread;
    explicit HostScope(void* as = nullptr)
        : device_thread(engine.current && __tsan_switch_to_fiber ? engine.current->tsan_fiber : nullptr) {
        if (device_thread) {
            __tsan_switch_to_fiber(as ? as : engine.tsan_host, 1);
        }
    }
    ~HostScope() {
        if (device_thread) {
            __tsan_switch_to_fiber(device_thread, 1);
        }
    }
};

// ---- the scheduler ----

// Switches from one stack to another; `thread` is the device thread that runs there, NULL for the
// host.
CUSIM_ALWAYS_INLINE void fiber_switch(Fiber* from, Fiber* to, DeviceThread* thread) {
    engine.total_switches++;
    engine.current = thread;
    if (thread) {
        threadIdx = thread->index;
        blockIdx = thread->block->index;
    }
    if (__tsan_switch_to_fiber) {
        __tsan_switch_to_fiber(thread ? thread->tsan_fiber : engine.tsan_host, 1);
    }
    if (__sanitizer_start_switch_fiber) {
        __sanitizer_start_switch_fiber(&from->asan_fake_stack, to->stack, to->stack_bytes);
    }
    cusim_swap_stacks(&from->stack_pointer, to->stack_pointer);
    if (__sanitizer_finish_switch_fiber) {
        __sanitizer_finish_switch_fiber(from->asan_fake_stack, nullptr, nullptr);
    }
}

CUSIM_ALWAYS_INLINE void thread_make_ready(DeviceThread* thread) {
    thread->state = THREAD_READY;
    engine.ready.push(thread);
}

static inline void thread_wake(DeviceThread* thread) {
    thread_make_ready(thread);
    engine.spins = 0;
}

// Wakes a thread for another lane of its warp: the warp runs as far as it can before others do. The
// stacks of 32 lanes fit into the first-level cache, those of a block do not.
static inline void thread_wake_in_warp(DeviceThread* thread) {
    thread->state = THREAD_READY;
    engine.ready.push_front(thread);
    engine.spins = 0;
}

// Returns true if the warp that ran last can continue without a search for its lanes.
CUSIM_ALWAYS_INLINE bool warp_is_first() {
    return !engine.ready.empty() && engine.ready.at(0)->warp == engine.last_warp;
}

static inline unsigned greedy_choice() {
    for (unsigned i = 0; i < engine.ready.size(); i++) {
        if (engine.ready.at(i)->warp == engine.last_warp) {
            return i;
        }
    }
    return random_below(engine.ready.size());
}

// Returns the next ready thread; at least one is ready.
CUSIM_ALWAYS_INLINE DeviceThread* thread_take_ready() {
    unsigned i = 0;
    if (config.order == ORDER_RANDOM) {
        i = random_below(engine.ready.size());
    } else if (config.order == ORDER_GREEDY) {
        i = greedy_choice();
    }
    DeviceThread* thread = engine.ready.take(i);
    engine.last_warp = thread->warp;
    thread->state = THREAD_RUNNING;
    return thread;
}

// Returns the next thread that has not started, and prepares its stack, without switching.
CUSIM_ALWAYS_INLINE DeviceThread* thread_take_new() {
    return &engine.threads[engine.order[engine.started++]];
}
CUSIM_ALWAYS_INLINE Fiber* thread_stack(DeviceThread* thread) {
    if (thread->own_fiber) {
        return thread->own_fiber;
    }
    if (engine.idle_fibers.empty()) {
        return fiber_new();
    }
    Fiber* fiber = engine.idle_fibers.back();
    engine.idle_fibers.pop_back();
    return fiber;
}
CUSIM_ALWAYS_INLINE void thread_begin(DeviceThread* thread, Fiber* fiber) {
    thread->state = THREAD_RUNNING;
    thread->fiber = fiber;
    engine.current = thread;
    engine.last_warp = thread->warp;
    threadIdx = thread->index;
    blockIdx = thread->block->index;
}

// Returns true if a thread that has not started comes before those that can continue. `up` and
// `down` start one when the warp that ran last cannot continue, `greedy` only when no other thread
// can, `random` mixes them.
CUSIM_ALWAYS_INLINE bool new_thread_comes_first() {
    switch (config.order) {
    case ORDER_RANDOM:
        return engine.ready.empty() || random_below(4);
    case ORDER_GREEDY:
        return engine.ready.empty();
    default:
        return !warp_is_first();
    }
}

// Switches to another thread: the running one cannot continue, or need not.
CUSIM_ALWAYS_INLINE void thread_switch_away() {
    DeviceThread* me = engine.current;
    Fiber* my_fiber = me->fiber;
    if (engine.started < engine.count && new_thread_comes_first()) {
        DeviceThread* thread = thread_take_new();
        Fiber* fiber = thread_stack(thread);
        thread_begin(thread, fiber);
        fiber_switch(my_fiber, fiber, thread);
    } else if (!engine.ready.empty()) {
        DeviceThread* thread = thread_take_ready();
        if (thread != me) {
            fiber_switch(my_fiber, thread->fiber, thread);
        }
    } else {
        die_of_deadlock();
    }
}

CUSIM_ALWAYS_INLINE void thread_wait(const char* why, const char* file, int line) {
    DeviceThread* thread = engine.current;
    thread->state = THREAD_BLOCKED;
    thread->why = why;
    thread->file = file;
    thread->line = line;
    thread_switch_away();
}

// Sometimes lets others run, in random order: the thread that completed a barrier does not continue
// first.
CUSIM_ALWAYS_INLINE void thread_perhaps_let_others_go() {
    if (config.order == ORDER_RANDOM && random_below(2)) {
        thread_make_ready(engine.current);
        thread_switch_away();
    }
}

// ---- shared memory, and proxies ----

// The window of shared memory starts with what the system reserves. Dynamic memory is aligned to
// 128 bytes, no more.
enum { SHARED_DYNAMIC_AT = 1024 + 128 };
// dynamic memory of the running block
char* shared_at(unsigned address, size_t bytes, const char* file, int line);
bool shared_is_marked(const char* from, size_t bytes);
void marks_publish(DeviceThread* thread);
CUSIM_ALWAYS_INLINE void barrier_orders_proxies() {
    if (!engine.current->fenced.empty()) {
        marks_publish(engine.current);
    }
}
void mbarriers_end(Block* block);

bool wgmma_is_in_flight(); // of the running warp
void wgmma_end(Block* block);

// ---- kernels, memory, streams ----

void kernel_run(const void* kernel, dim3 grid, dim3 block, size_t dynamic_bytes, bool cooperative,
                const std::function<void()>& body);
void barrier_reset(Barrier* barrier, unsigned threads);

typedef enum {
    MEMORY_DEVICE,
    MEMORY_HOST,
    MEMORY_REGISTERED
} MemoryKind; // HOST: pinned; REGISTERED: pinned later
typedef struct {
    char* data;
    size_t bytes;
    MemoryKind kind;
} Allocation;
// allocation of a pointer; NULL: none, pageable host memory
Allocation* allocation_of(const void* pointer);
size_t device_memory_bytes();
// for an allocation, or a library; false if not enough is left
bool device_memory_take(size_t bytes);
void device_memory_give(size_t bytes);
void device_memory_open(); // CUSIM_PROTECT: around work that may touch device memory
void device_memory_close();

// Progress of work that may have to wait: for another stream, or for another process.
typedef enum {
    STEP_DONE,
    STEP_MOVED,   // more is left to do
    STEP_WAITING, // another process is on its way
    STEP_STUCK    // another process waits, too, perhaps for other work of this one
} Step;
typedef std::function<Step()> Steps; // called until it returns STEP_DONE

struct CUstream_st;
struct Operation {
    std::function<void()> run;
    bool on_device;
    // instead of `run`: called when the work, or its graph, is put on a stream
    std::function<Steps(CUstream_st*)> begin;
};
// time of the device's clock: for a kernel or a copy; a matmul counts ten times as much
static const double OPERATION_S = 10e-6;
void cusim_pass_time(double seconds);
void operation_run(const Operation& operation);
void enqueue_steps(cudaStream_t stream, std::function<Steps(CUstream_st*)> begin);
// one step of the first work in its queue; never STEP_DONE
Step stream_advance(CUstream_st* stream);
bool streams_advance_any(const CUstream_st* but);

// A counter that other processes read: odd while this process waits for them. The step that waits
// makes it odd; the next step that makes progress makes it even again.
std::vector<std::atomic<unsigned>*>& waiting_flags();
void process_waits(bool waits);

struct Capture;
CUstream_st* stream_of(cudaStream_t stream);
void stream_drain(cudaStream_t stream);
// Ends the program if work is queued: on this stream, or on any if it is NULL. Not in eager order,
// which has no queue.
void expect_idle(const char* call, const CUstream_st* only);
// Returns an error if `stream` may not be given work, and spoils the capture that forbids it.
cudaError_t stream_accepts(cudaStream_t stream);
// Returns an error during a capture, which allows no call that waits or allocates.
cudaError_t synchronizing_call();

size_t kernel_dynamic_limit(const void* kernel);
cudaError_t failed(cudaError_t error); // stores it for cudaGetLastError

#endif
